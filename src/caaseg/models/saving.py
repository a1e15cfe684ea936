"""Models on disk and on the hub: a folder with model.safetensors, config.json and a model card."""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
from safetensors.torch import save_file
from torch import Tensor, nn

from caaseg.config import ModelConfig
from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.models.weights import check_fits, read_tensors

if TYPE_CHECKING:
    from caaseg.models.segmenter import Segmenter

HUB = "hf://"
CONFIG = "config.json"
CARD_FILE = "README.md"
WEIGHTS = "model.safetensors"
PYTORCH_WEIGHTS = "pytorch_model.bin"
CLASSIFIERS = ("classifier.", "branch_classifiers.", "aux.2.")  # what depends on the number of classes

CARD = """---
{{ card_data }}
---

# {{ config.head }} on {{ config.backbone }}, {{ config.num_classes }} classes

A semantic segmentation model: head `{{ config.head }}`, backbone `{{ config.backbone }}`
{%- if config.stages %} up to stage {{ config.stages }}{% endif %}, output stride
{{ config.output_stride }}
{%- if config.input_upsampling != 1 %}, images enlarged {{ config.input_upsampling }} times inside{% endif %}
{%- if config.decoder %}, simple decoder{% endif %}. The heads, and what sets Channelized Axial
Attention apart, are described in Huang et al., Channelized Axial Attention, AAAI 2022.

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
## Training

{{ training | default("Not recorded: the model was saved outside a training run.", true) }}
"""


class HubModel(ModelHubMixin, library_name="caaseg", pipeline_tag="image-segmentation", model_card_template=CARD):
    """Gives a model save_pretrained, push_to_hub and from_pretrained."""

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
        """Write a folder that `load_model` reads: weights, config and model card, together or not at all.

        Args:
            save_directory: the folder; a model in it is replaced.
            model_card_kwargs: what the card says beside what the model knows, such as training.
            push_to_hub: also upload it, as `push_to_hub` does.
            repo_id: the hub's name for it; the folder's name unless given.
            push_to_hub_kwargs: further arguments of `push_to_hub`.
        """
        assert isinstance(self, nn.Module)
        folder, card_kwargs = Path(save_directory), model_card_kwargs or {}
        config = json.dumps(self.config.as_dict(), indent=1) + "\n"
        card = str(self.generate_model_card(**card_kwargs))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with (
            atomic_write(folder / WEIGHTS) as weights_aside,
            atomic_write(folder / CONFIG) as config_aside,
            atomic_write(folder / CARD_FILE) as card_aside,
        ):
            save_file(tensors, weights_aside, metadata={"format": "pt"})
            config_aside.write_text(config)
            shutil.copymode(config_aside, weights_aside)  # or else nobody but its owner may read it
            card_aside.write_text(card)
        if not push_to_hub:
            return None
        return str(self.push_to_hub(repo_id or folder.name, model_card_kwargs=card_kwargs, **push_to_hub_kwargs))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        backbone: Any = self.backbone  # type: ignore[attr-defined]
        escaped = [_in_a_table(name) for name in self.config.classes or ()]
        known = {"config": self.config, "classes": escaped, "mean": backbone.mean, "std": backbone.std}
        return super().generate_model_card(*args, **known, **kwargs)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, num_classes: int | None = None) -> "Segmenter":  # type: ignore[override]
        return load_model(source, num_classes=num_classes)


def load_model(source: str | Path, *, num_classes: int | None = None, revision: str | None = None) -> "Segmenter":
    """A model from a saved folder, a run's folder or the hub, in evaluation mode. Never runs code from a file.

    Weights that were saved in 16 bits, as after `model.half()`, are widened to 32.

    Args:
        source: a folder that save_pretrained wrote, a training run's folder, or hf://owner/name for a model on the hub.
        num_classes: for fine-tuning on other classes: all weights are kept but the classifiers', which start anew.
        revision: a branch, tag or commit of a model on the hub.
    """
    from caaseg.models.segmenter import Segmenter

    folder = _folder(source, revision)
    config = read_config(folder / CONFIG)
    weights = folder / WEIGHTS if (folder / WEIGHTS).exists() else folder / PYTORCH_WEIGHTS
    tensors = read_tensors(weights if weights.exists() else folder / WEIGHTS)
    try:
        with torch.device("meta"):  # so that a config that asks for too much takes no memory
            check_fits(Segmenter(config), tensors, str(weights))
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(str(error) if str(weights) in str(error) else f"{folder / CONFIG}: {error}") from error
    if num_classes is not None and num_classes != config.num_classes:
        config = config.replace(num_classes=num_classes, classes=None, palette=None)
    model = Segmenter(config)
    learned = len(tensors["classifier.weight"])
    if config.num_classes != learned:
        warnings.warn(
            f"{source} was learned on {learned} classes and is loaded with {num_classes}: the classifiers start anew, "
            "everything else is kept",
            stacklevel=2,
        )
        tensors = _with_classifiers_of(model, tensors)
    # Assigned, they keep the width they were saved in; cloned, they lie as aligned in memory as any other tensor.
    model.load_state_dict({name: _widened(tensor) for name, tensor in tensors.items()}, assign=True)
    return model.eval()


def _widened(tensor: Tensor) -> Tensor:
    """A copy, of 32 bits where it was saved in 16: those are for files, and images are not of 16 bits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()


def _with_classifiers_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ours = model.state_dict()
    return {
        name: ours[name].to(tensor.dtype) if name.startswith(CLASSIFIERS) else tensor
        for name, tensor in tensors.items()
    }


def _in_a_table(name: str) -> str:
    return " ".join(name.split()).replace("|", "\\|")


def _folder(source: str | Path, revision: str | None) -> Path:
    path = Path(source)
    for folder in (path, path / "model"):  # a saved model, or a run's folder, which holds one
        if (folder / CONFIG).is_file():
            return folder
    if (path / "best" / CONFIG).is_file():
        raise ValueError(
            f"{source}: a run that is not finished; go on with it by --resume auto, or take what scored best on its "
            f"validation split so far, {path / 'best'}"
        )
    if path.exists():
        raise ValueError(
            f"{source}: holds no model; expected a folder with {CONFIG} and {WEIGHTS}, or a run's folder with model/"
        )
    name = str(source).removeprefix(HUB)
    if name == str(source):
        hint = f"; did you mean {HUB}{source}?" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
        raise CaasegError(
            f"{source}: no such model; expected a run, a model directory, an .onnx file or {HUB}owner/name{hint}"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CaasegError(f"{source}: not the name of a model on the hub; expected {HUB}owner/name")
    try:
        files = [CONFIG, WEIGHTS, PYTORCH_WEIGHTS]
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(
            f"{source}: cannot be downloaded from the hub ({reason}); check the name and the network"
        ) from error


def read_config(path: Path) -> ModelConfig:
    """A model's config.json, checked field by field."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a model's config ({error}); expected the JSON that save_pretrained wrote"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {type(content).__name__}; expected the JSON object that save_pretrained wrote")
    if "enlarge" in content:  # the name of this field in version 0.1
        content["input_upsampling"] = content.pop("enlarge")
    return ModelConfig.read(content, f"{path}: ")
