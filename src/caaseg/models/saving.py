"""Saved models: a directory with model.safetensors, config.json and a model card, on disk or on the hub."""

import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from huggingface_hub import ModelCard, ModelHubMixin
from safetensors.torch import save_file
from torch import nn

from caaseg.config import ModelConfig
from caaseg.errors import CaasegError
from caaseg.files import atomic_write, read_json
from caaseg.models.heads import HEADS, resolve_head
from caaseg.models.weights import check_finite, check_fits, read_tensors

if TYPE_CHECKING:
    from caaseg.models.heads.base import Head
    from caaseg.models.segmenter import Segmenter

logger = logging.getLogger(__name__)

HUB = "hf://"
SHIPPED = Path(__file__).parent.parent / "shipped"
CONFIG = "config.json"
CARD_FILE = "README.md"
WEIGHTS = "model.safetensors"
PYTORCH_WEIGHTS = "pytorch_model.bin"
CLASSIFIERS = ("classifier.", "branch_classifiers.", "aux.2.", "head.classifier.")
"""Prefixes of the names of weights whose shape depends on num_classes."""

CARD = """---
{{ card_data }}
---

# {{ config.head }} on {{ config.backbone }}, {{ config.num_classes }} classes

A semantic segmentation model: head `{{ config.head }}`, backbone `{{ config.backbone }}`
{%- if config.stages %} up to stage {{ config.stages }}{% endif %}, output stride
{{ config.output_stride }}
{%- if config.input_upsampling != 1 %}, images upsampled {{ config.input_upsampling }} times{% endif %}
{%- if config.decoder %}, simple decoder{% endif %}. The heads are described in Huang et al.,
Channelized Axial Attention, AAAI 2022.

```python
import caaseg

model = caaseg.load_model("{{ 'hf://' ~ repo_id if repo_id else 'path/to/this/directory' }}")
prediction = model(images)  # images normalized with mean {{ mean }} and standard deviation {{ std }}
```
{% if classes %}
## Classes

| id | name |{% if config.palette %} color |{% endif %}
|---|---|{% if config.palette %}---|{% endif %}
{% for name in classes -%}
| {{ loop.index0 }} | {{ name }} |{% if config.palette %} {{ config.palette[loop.index0] | join(", ") }} |{% endif %}
{% endfor %}
{%- endif %}
{% if config.license -%}
## License

The license of these weights, and of the weights they were trained from, is {{ config.license }}.

{% endif -%}
## Training

{{ training | default("Not recorded: the model was saved outside a training run.", true) }}
"""


class HubModel(ModelHubMixin, library_name="caaseg", pipeline_tag="image-segmentation", model_card_template=CARD):
    """Mixin with save_pretrained, push_to_hub and from_pretrained."""

    config: ModelConfig

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        model_card_kwargs: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Save weights, config and model card to a directory that `load_model` reads. A failed save changes no file.

        Args:
            save_directory: the directory; a model in it is replaced.
            model_card_kwargs: further values for the card's template, such as training.
            push_to_hub: upload it too, as `push_to_hub` does.
            repo_id: id on the hub; the directory's name by default.
            push_to_hub_kwargs: further arguments of `push_to_hub`.
        """
        assert isinstance(self, nn.Module)
        directory, card_kwargs = Path(save_directory), model_card_kwargs or {}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        check_finite(tensors, f"{directory}: not saved", "train again with a lower learning rate")
        config = json.dumps(self.config.as_dict(), indent=1) + "\n"
        card = str(self.generate_model_card(**card_kwargs))
        with (
            atomic_write(directory / WEIGHTS) as weights_file,
            atomic_write(directory / CONFIG) as config_file,
            atomic_write(directory / CARD_FILE) as card_file,
        ):
            save_file(tensors, weights_file, metadata={"format": "pt"})
            config_file.write_text(config, encoding="utf-8")
            shutil.copymode(config_file, weights_file)  # safetensors makes it readable by its owner only
            card_file.write_text(card, encoding="utf-8", errors="backslashreplace")
        if not push_to_hub:
            return None
        return str(self.push_to_hub(repo_id or directory.name, model_card_kwargs=card_kwargs, **push_to_hub_kwargs))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the model card: architecture, classes and training. Called by `save_pretrained`."""
        backbone: Any = self.backbone  # type: ignore[attr-defined]
        classes = [" ".join(name.split()).replace("|", "\\|") for name in self.config.classes or ()]
        values = {"config": self.config, "classes": classes, "mean": backbone.mean, "std": backbone.std}
        return super().generate_model_card(*args, **values, **kwargs)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, num_classes: int | None = None) -> "Segmenter":  # type: ignore[override]
        """Load a model in evaluation mode; see `load_model`.

        Args:
            source: a model directory, a run directory, the name of a shipped model, or hf://owner/name.
            num_classes: for fine-tuning on other classes; the classifiers are then initialized anew.
        """
        return load_model(source, num_classes=num_classes)


def load_model(
    source: str | Path,
    *,
    num_classes: int | None = None,
    revision: str | None = None,
    head: "str | type[Head] | None" = None,
    backbone: nn.Module | None = None,
) -> "Segmenter":
    """Load a model in evaluation mode. Never runs code from the files of the model.

    Weights that were saved in 16 or 64 bits, as after `model.half()`, are converted to 32.

    Args:
        source: a directory that save_pretrained wrote, a run directory, the name of a shipped model, or hf://owner/name
            for a model on the hub.
        num_classes: for fine-tuning on other classes: the classifiers are initialized anew, all other weights are
            loaded.
        revision: branch, tag or commit of a model on the hub.
        head: class of a head that is not built in, or "file.py:Class", which executes the file.
        backbone: module for a model that was created with a backbone module; the saved weights are loaded into it.

    Returns:
        The model, on the CPU.
    """
    from caaseg.models.segmenter import Segmenter

    directory = _find_directory(source, revision)
    config = read_config(directory / CONFIG)
    if head is None and config.head not in HEADS:
        raise CaasegError(
            f"{directory / CONFIG}: head is {config.head!r}, which is not built in; pass its class: "
            "load_model(..., head=MyHead)"
        )
    if backbone is None and ":" in config.backbone:
        raise CaasegError(
            f"{directory / CONFIG}: the backbone is a module of class {config.backbone}; pass a module: "
            "load_model(..., backbone=module)"
        )
    kind = resolve_head(config.head if head is None else head)
    weights = directory / WEIGHTS if (directory / WEIGHTS).exists() else directory / PYTORCH_WEIGHTS
    tensors = read_tensors(weights if weights.exists() else directory / WEIGHTS)
    try:
        with torch.device("meta"):  # a config with huge sizes takes no memory
            check_fits(Segmenter(config, head=kind, backbone=backbone), tensors, str(weights))
    except (ValueError, RuntimeError, TypeError) as error:
        raise CaasegError(str(error) if str(weights) in str(error) else f"{directory / CONFIG}: {error}") from error
    if num_classes is not None and num_classes != config.num_classes:
        config = config.replace(num_classes=num_classes, classes=None, palette=None, mask_values=None)
    model = Segmenter(config, head=kind, backbone=backbone)
    trained = len(tensors["classifier.weight"])
    if config.num_classes != trained:
        warnings.warn(
            f"{source} was trained on {trained} classes and is loaded with {num_classes}: the classifiers are "
            "initialized anew, all other weights are loaded",
            stacklevel=2,
        )
        tensors |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith(CLASSIFIERS)}
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    # Copies are aligned in memory like any other tensor; the tensors of a file may be views of its bytes.
    converted = {name: tensor.to(dtypes[name], copy=True) for name, tensor in tensors.items()}
    check_finite(converted, str(weights), "use another checkpoint, or train again with a lower learning rate")
    model.load_state_dict(converted, assign=True)
    return model.eval()


def _find_directory(source: str | Path, revision: str | None) -> Path:
    """Return the directory with the model's files; download it if the source is a hub id."""
    path = Path(source)
    for directory in (path, path / "model"):  # a saved model, or a run directory
        if (directory / CONFIG).is_file():
            return directory
    if (path / "recipe.yaml").is_file():
        best = f", or use {path / 'best'}" if (path / "best" / CONFIG).is_file() else ""
        raise CaasegError(
            f"{source}: a run without model/: it is not finished, or the model was deleted; resume it, or restore its "
            f"model, with caaseg train {path / 'recipe.yaml'} --out {path} --resume auto{best}"
        )
    if (path / "best" / CONFIG).is_file():
        raise CaasegError(
            f"{source}: an unfinished run; resume it with --resume auto, or use the model with the best validation "
            f"score so far, {path / 'best'}"
        )
    if str(source) in shipped_models():  # even if a directory with this name exists, such as one with a dataset
        return SHIPPED / str(source)
    if path.exists():
        raise CaasegError(
            f"{source}: contains no model; expected a directory with {CONFIG} and {WEIGHTS}, or a run directory with "
            "model/"
        )
    name = str(source).removeprefix(HUB)
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    if name == str(source):
        hint = f"; did you mean {HUB}{source}?" if is_hub_name else ""
        raise CaasegError(
            f"{source}: no such model; expected a run, a model directory, an .onnx file, {HUB}owner/name, or a shipped "
            f"model: {', '.join(shipped_models())}{hint}"
        )
    if not is_hub_name:
        raise CaasegError(f"{source}: not the name of a model on the hub; expected {HUB}owner/name")
    try:
        files = [CONFIG, WEIGHTS, PYTORCH_WEIGHTS]
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(
            f"{source}: cannot be downloaded from the hub ({reason}); check the name and the network"
        ) from error


def log_license(source: str | Path, config: ModelConfig) -> None:
    """Log the license of a shipped model."""
    if config.license is not None and str(source) in shipped_models():
        card = SHIPPED / str(source) / CARD_FILE
        logger.warning("%s: the license of its weights is %s; see %s", source, config.license, card)


def shipped_models() -> list[str]:
    """Return the names of the models in the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def read_config(path: Path) -> ModelConfig:
    """Read and validate a model's config.json."""
    content = read_json(path, "expected the JSON that save_pretrained wrote")
    if not isinstance(content, dict):
        raise CaasegError(
            f"{path}: found {type(content).__name__}; expected the JSON object that save_pretrained wrote"
        )
    if "enlarge" in content:  # the name of this field in version 0.1
        content["input_upsampling"] = content.pop("enlarge")
    if content.get("resnet_variant") == "authors" and "dilation" not in content:  # saved by an earlier version
        content["dilation"] = "timm"
    return ModelConfig.read(content, f"{path}: ")
