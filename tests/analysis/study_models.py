"""Small models for the tests of studies, reports and the app."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import caaseg
from caaseg.data.datasets.scenes import Scenes

SMALL: dict[str, Any] = {"backbone": "test_resnet", "channels": 8, "key_channels": 4, "gate_width": 8}


def model_with(head: str) -> caaseg.Segmenter:
    """A model of 5 classes with initial weights, in evaluation mode."""
    torch.manual_seed(3)
    return caaseg.create_model(head, num_classes=5, output_stride=8, **SMALL).eval()


def build_model(head: str, **options: Any) -> caaseg.Segmenter:
    """A model in evaluation mode whose predictions vary: random classifier, updated batch-norm statistics."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"channels": 16, "key_channels": 4, "gate_width": 8, "gate_layers": 1}
    model = caaseg.create_model(head, backbone="test_resnet", **{"num_classes": 5, **small, **options})
    model(torch.randn(2, 3, 33, 33))
    nn.init.normal_(model.classifier.weight)
    return model.eval()


def save_model(head: str, directory: Path, **options: Any) -> str:
    """Save a model for the classes of the scenes and return its path."""
    build_model(head, num_classes=8, classes=Scenes.classes, **options).save_pretrained(directory)
    return str(directory)
