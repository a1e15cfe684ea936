"""Whole models, ours beside torchvision's: images a second and peak memory, in training and in inference."""

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from caaseg.evaluation.measure import Cost, measure
from caaseg.models import HEADS, Prediction, create_model


class Setting(NamedTuple):
    """What all models of one comparison share."""

    backbone: str
    output_stride: int
    batch: int
    size: tuple[int, int]
    num_classes: int
    dtype: str


class ModelCost(NamedTuple):
    """What one model took."""

    model: str
    training_images_per_second: float
    training_peak_bytes: int
    inference_images_per_second: float
    inference_peak_bytes: int


def measure_model(name: str, setting: Setting, device: torch.device, *, seconds: float) -> ModelCost:
    """Build a model, train it for a while on random images, then run it.

    Args:
        name: a head of ours, "caa:grouped", "torchvision:fcn" or "torchvision:deeplabv3".
        setting: backbone, sizes and dtype.
        device: where.
        seconds: about how long to repeat each of the two.
    """
    training, inference = _train_and_infer(build(name, setting).to(device), setting, device, seconds)
    gc.collect()  # a model and its optimiser may refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ModelCost(
        model=name,
        training_images_per_second=setting.batch / training.seconds,
        training_peak_bytes=training.peak_bytes,
        inference_images_per_second=setting.batch / inference.seconds,
        inference_peak_bytes=inference.peak_bytes,
    )


def _train_and_infer(model: nn.Module, setting: Setting, device: torch.device, seconds: float) -> tuple[Cost, Cost]:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(setting.batch, 3, *setting.size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(setting.num_classes, (setting.batch, *setting.size), device=device)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    autocast = torch.autocast(device.type, getattr(torch, setting.dtype), enabled=setting.dtype != "float32")

    def train() -> None:
        with autocast:
            losses = [cross_entropy(logits, labels) for logits in outputs(model(images))]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()

    def infer() -> Tensor:
        with torch.inference_mode(), autocast:
            return outputs(model(images))[0]

    train()  # makes the momentum, so that it counts as given
    momentum = [state["momentum_buffer"] for state in optimiser.state.values()]
    given = [images, labels, *model.parameters(), *model.buffers()]
    training = measure(train, [*given, *momentum], device, seconds=seconds)
    model.eval()
    return training, measure(infer, given, device, seconds=seconds)


def build(name: str, setting: Setting) -> nn.Module:
    """A contender by its name."""
    family, _, kind = name.rpartition(":")
    if family == "torchvision" and kind in ("fcn", "deeplabv3"):
        from torchvision.models import segmentation

        builder = getattr(segmentation, f"{kind}_{setting.backbone}")
        model: nn.Module = builder(weights=None, weights_backbone=None, num_classes=setting.num_classes)
        return model
    head, implementation = (family, kind) if family else (kind, "auto")
    if head not in HEADS or (family and head != "caa"):
        raise ValueError(
            f"model is {name!r}; expected torchvision:fcn, torchvision:deeplabv3, caa:grouped "
            f"or one of {', '.join(HEADS)}"
        )
    options: dict[str, Any] = {"output_stride": setting.output_stride, "implementation": implementation}
    return create_model(head, backbone=setting.backbone, num_classes=setting.num_classes, **options)


def outputs(prediction: Prediction | dict[str, Tensor]) -> list[Tensor]:
    """All full-size logits a loss is put on: ours first, then branches; torchvision's by name."""
    if isinstance(prediction, dict):
        return list(prediction.values())
    return [prediction.logits, *prediction.branches.values()]
