"""Semantic segmentation with Channelized Axial Attention."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caaseg.api import train as train
    from caaseg.evaluation.evaluate import Evaluation as Evaluation
    from caaseg.evaluation.evaluate import evaluate as evaluate
    from caaseg.models import ModelConfig as ModelConfig
    from caaseg.models import Prediction as Prediction
    from caaseg.models import Segmenter as Segmenter
    from caaseg.models import create_model as create_model
    from caaseg.models.loading import load_model as load_model
    from caaseg.models.predictor import Predictor as Predictor
    from caaseg.models.result import Result as Result
    from caaseg.recipes import load_recipe as load_recipe

__version__ = "0.1.0"

# Public names are imported at first use, so that `import caaseg` is fast.
_MODULES = {
    "Evaluation": "caaseg.evaluation.evaluate",
    "ModelConfig": "caaseg.models",
    "Prediction": "caaseg.models",
    "Predictor": "caaseg.models.predictor",
    "Result": "caaseg.models.result",
    "Segmenter": "caaseg.models",
    "create_model": "caaseg.models",
    "evaluate": "caaseg.evaluation.evaluate",
    "load_model": "caaseg.models.loading",
    "load_recipe": "caaseg.recipes",
    "train": "caaseg.api",
}

__all__ = [
    "Evaluation",
    "ModelConfig",
    "Prediction",
    "Predictor",
    "Result",
    "Segmenter",
    "__version__",
    "create_model",
    "evaluate",
    "load_model",
    "load_recipe",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'caaseg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
