"""Segmentation models: backbones, heads, decoder, saving, inference and export."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caaseg.config import ModelConfig as ModelConfig
    from caaseg.models.heads import HEADS as HEADS
    from caaseg.models.saving import load_model as load_model
    from caaseg.models.segmenter import Prediction as Prediction
    from caaseg.models.segmenter import Segmenter as Segmenter
    from caaseg.models.segmenter import create_model as create_model
    from caaseg.models.segmenter import with_output_stride as with_output_stride

# Submodules are imported at first use: the settings import `caaseg.models.heads`, which must not import torch.
_MODULES = {
    "HEADS": "caaseg.models.heads",
    "ModelConfig": "caaseg.config",
    "Prediction": "caaseg.models.segmenter",
    "Segmenter": "caaseg.models.segmenter",
    "create_model": "caaseg.models.segmenter",
    "load_model": "caaseg.models.saving",
    "with_output_stride": "caaseg.models.segmenter",
}

__all__ = ["HEADS", "ModelConfig", "Prediction", "Segmenter", "create_model", "load_model", "with_output_stride"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'caaseg.models' has no attribute {name!r}")
