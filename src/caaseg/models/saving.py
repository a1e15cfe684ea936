"""Models on disk and on the hub: a folder with model.safetensors, config.json and a model card."""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
from jsonargparse import ArgumentError, ArgumentParser
from safetensors.torch import save_file
from torch import Tensor, nn

from caaseg.config import ModelConfig
from caaseg.files import written_whole
from caaseg.models.weights import load_exactly, read_tensors

if TYPE_CHECKING:
    from caaseg.models.segmenter import Segmenter

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PYTORCH_WEIGHTS = "pytorch_model.bin"
CLASSIFIERS = ("classifier.", "branch_classifiers.", "aux.2.")  # what depends on the number of classes

CARD = """---
{{ card_data }}
---

# {{ config.head }} on {{ config.backbone }}, {{ config.num_classes }} classes

A semantic segmentation model: head `{{ config.head }}`, backbone `{{ config.backbone }}`, output stride
{{ config.output_stride }}{% if config.decoder %}, simple decoder{% endif %}. The heads, and what sets Channelized Axial
Attention apart, are described in Huang et al., Channelized Axial Attention, AAAI 2022.

```python
import caaseg

model = caaseg.load_model("{{ repo_id | default('this folder', true) }}").eval()
prediction = model(images)  # images normalised with mean {{ mean }} and standard deviation {{ std }}
```
{% if config.classes %}
## Classes

| id | name |{% if config.palette %} colour |{% endif %}
|---|---|{% if config.palette %}---|{% endif %}
{% for name in config.classes -%}
| {{ loop.index0 }} | {{ name }} |{% if config.palette %} {{ config.palette[loop.index0] | join(", ") }} |{% endif %}
{% endfor %}
{%- endif %}
## Training

{{ training | default("Not recorded: the model was saved outside a training run.", true) }}
"""


class HubModel(ModelHubMixin, library_name="caaseg", pipeline_tag="image-segmentation", model_card_template=CARD):
    """Gives a model save_pretrained, push_to_hub and from_pretrained."""

    config: ModelConfig

    def _save_pretrained(self, save_directory: Path) -> None:
        assert isinstance(self, nn.Module)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with written_whole(save_directory / WEIGHTS) as aside:
            save_file(tensors, aside, metadata={"format": "pt"})
        with written_whole(save_directory / CONFIG) as aside:
            aside.write_text(json.dumps(asdict(self.config), indent=1) + "\n")

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        backbone: Any = self.backbone  # type: ignore[attr-defined]
        return super().generate_model_card(*args, config=self.config, mean=backbone.mean, std=backbone.std, **kwargs)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, num_classes: int | None = None) -> "Segmenter":  # type: ignore[override]
        return load_model(source, num_classes=num_classes)


def load_model(source: str | Path, *, num_classes: int | None = None) -> "Segmenter":
    """A model from a saved folder, a run's folder or the hub, in evaluation mode. Never runs code from a file.

    Args:
        source: a folder that save_pretrained wrote, a training run's folder, or a hub id such as owner/name.
        num_classes: for fine-tuning on other classes: all weights are kept but the classifiers', which start anew.
    """
    from caaseg.models.segmenter import Segmenter

    folder = _folder(source)
    config = read_config(folder / CONFIG)
    weights = folder / WEIGHTS if (folder / WEIGHTS).exists() else folder / PYTORCH_WEIGHTS
    tensors = read_tensors(weights if weights.exists() else folder / WEIGHTS)
    if num_classes is None or num_classes == config.num_classes:
        model = Segmenter(config)
        load_exactly(model, tensors, str(weights))
        return model.eval()
    model = Segmenter(replace(config, num_classes=num_classes, classes=None, palette=None))
    load_exactly(model, _with_classifiers_of(model, tensors), str(weights))
    warnings.warn(
        f"{source} was learned on {config.num_classes} classes and is loaded with {num_classes}: the classifiers start "
        "anew, everything else is kept",
        stacklevel=2,
    )
    return model.eval()


def _with_classifiers_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(CLASSIFIERS)}
    return {name: fresh.get(name, tensor) for name, tensor in tensors.items()}


def _folder(source: str | Path) -> Path:
    path = Path(source)
    for folder in (path, path / "model"):  # a saved model, or a run's folder, which holds one
        if (folder / CONFIG).is_file():
            return folder
    if path.exists():
        raise ValueError(
            f"{source}: holds no model; expected a folder with {CONFIG} and {WEIGHTS}, or a run's folder with model/"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ValueError(f"{source}: no such folder, and not a hub id (owner/name); give the folder of a saved model")
    try:
        return Path(snapshot_download(str(source), allow_patterns=[CONFIG, WEIGHTS, PYTORCH_WEIGHTS]))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source}: no such folder, and the hub did not give it ({reason}); check the name and the network"
        ) from error


def read_config(path: Path) -> ModelConfig:
    """A model's config.json, checked field by field."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: not a model's config ({error}); expected the JSON that save_pretrained wrote"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {type(content).__name__}; expected the JSON object that save_pretrained wrote")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ModelConfig)
    try:
        return ModelConfig(**parser.parse_object(content).as_dict())
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
