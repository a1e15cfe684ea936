"""Small models and images that several test modules share."""

from typing import Any

import torch
from torch import Tensor, nn

import caaseg
from caaseg.data.datasets.scenes import Scenes
from caaseg.models.heads.base import Head

SMALL: dict[str, Any] = {
    "backbone": "test_resnet",
    "num_classes": 5,
    "channels": 16,
    "key_channels": 4,
    "gate_width": 8,
}


def small_model(head: str | type[Head] = "caa", **options: Any) -> caaseg.Segmenter:
    """Return a model with initial weights, in training mode."""
    torch.manual_seed(0)
    return caaseg.create_model(head, **{**SMALL, **options})


def with_statistics(model: caaseg.Segmenter) -> caaseg.Segmenter:
    """Update the initial batch norm statistics with a random batch; return the model in evaluation mode."""
    model.train()(torch.randn(2, 3, 33, 33))
    return model.eval()


def varied_model(num_classes: int = 6, **options: Any) -> caaseg.Segmenter:
    """Return a random model that predicts every class somewhere in a scene."""
    model = with_statistics(small_model(num_classes=num_classes, **{"decoder": True, **options}))
    nn.init.normal_(model.classifier.weight)
    with torch.no_grad():
        logits = model(torch.stack([scene(k) for k in range(4)]) / 127.5 - 1).logits  # (N, K, H, W)
        std = logits.std((0, 2, 3))
        model.classifier.weight /= std[:, None, None, None]
        model.classifier.bias.copy_((model.classifier.bias - logits.mean((0, 2, 3))) / std)  # type: ignore[union-attr]
    return model


def scenes_model() -> caaseg.Segmenter:
    """Return a random model with the classes of the drawn scenes."""
    torch.manual_seed(5)
    options = {**SMALL, "channels": 8, "num_classes": len(Scenes.classes), "output_stride": 8}
    return caaseg.create_model("caa", classes=Scenes.classes, palette=Scenes.palette, **options).eval()


def pointwise_model(num_classes: int = 5) -> nn.Module:
    """Return a model that classifies each pixel by itself."""
    torch.manual_seed(0)
    return nn.Conv2d(3, num_classes, 1)


def random_images(*size: int, seed: int = 0) -> Tensor:
    """Return uint8 noise of shape (..., 3, H, W) for a size (..., H, W)."""
    return torch.randint(0, 256, (*size[:-2], 3, *size[-2:]), generator=torch.Generator().manual_seed(seed)).byte()


def scene(k: int, height: int = 72, width: int = 96) -> Tensor:
    """Return a drawn scene, (3, H, W) uint8."""
    return Scenes("val", length=8, size=(height, width))[k].image
