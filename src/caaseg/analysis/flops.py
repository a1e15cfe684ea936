"""Multiply-adds and parameters of a model, counted on the meta device; the paper's FLOPs columns beside ours."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from caaseg.attention import ChannelGate
from caaseg.models import ModelConfig, Segmenter

CONVENTION = (
    "one multiply-add counted as one; convolutions, linear layers and matrix products; "
    "no normalization, activation, pooling or resizing; 1G = 1e9"
)
GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a model takes for one image."""

    backbone: int  # multiply-adds
    head: int  # all behind the backbone but the channel gates: head, decoder, classifiers, auxiliary branch
    gates: int  # the channel gates
    parameters: int

    @property
    def total(self) -> int:
        return self.backbone + self.head + self.gates


def count(config: ModelConfig, size: tuple[int, int]) -> Count:
    """Count one image of (height, width). No weight is made: everything lives on the meta device."""
    model, by_module = _by_module(config, size)
    total, backbone = by_module["Segmenter"], by_module["Segmenter.backbone"]
    names = [f"Segmenter.{name}" for name, module in model.named_modules() if isinstance(module, ChannelGate)]
    gates = sum(by_module.get(name, 0) for name in names)
    parameters = sum(weight.numel() for weight in model.parameters())
    return Count(backbone=backbone, head=total - backbone - gates, gates=gates, parameters=parameters)


def _by_module(config: ModelConfig, size: tuple[int, int]) -> tuple[Segmenter, dict[str, int]]:
    """A model without weights, and the multiply-adds of each of its modules."""
    with torch.device("meta"):
        model = Segmenter(config).eval()
        images = torch.empty(1, 3, *size)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(images)
    return model, {name: sum(operations.values()) // 2 for name, operations in counter.get_flop_counts().items()}


class PaperRow(NamedTuple):
    """A figure of the paper beside ours, in multiply-adds, with what explains the difference."""

    table: str
    what: str
    ours: float
    paper: float
    note: str


def paper_rows() -> list[PaperRow]:
    """Table 1's and Table 4's FLOPs columns for ResNet-101 at 513 x 513, and ours."""
    size = (513, 513)
    at = {
        stride: ModelConfig(head="axial", backbone="resnet101", num_classes=59, output_stride=stride)
        for stride in (16, 8)
    }
    rows = []
    for stride, published in ((16, 59.85), (8, 190.70)):
        authors = at[stride].replace(resnet_variant="authors", multi_grid=(1, 2, 4))
        standard, variant = count(at[stride], size), count(authors, size)
        rows.append(
            PaperRow(
                "4",
                f"backbone, stride {stride}, authors' ResNet-101",
                variant.backbone,
                published * GIGA,
                f"deep stem, strides in the stages' last blocks: {variant.backbone / GIGA / published:.1%} of theirs",
            )
        )
        rows.append(
            PaperRow(
                "4",
                f"backbone, stride {stride}, standard ResNet-101",
                standard.backbone,
                published * GIGA,
                "the default here, because published ImageNet weights fit it: 7x7 stem, strides in the first blocks",
            )
        )
    for stride, published in ((16, 8.85), (8, 34.33)):
        ours = count(at[stride], size)
        rows.append(
            PaperRow(
                "4",
                f"axial head, stride {stride}",
                ours.head,
                published * GIGA,
                "theirs is exactly 31 x 512^2 a pixel, which is not the head they released (its 3x3 entry convolution "
                "alone is more): another head was counted",
            )
        )
    danet = count(at[8].replace(head="danet"), size)
    rows.append(
        PaperRow(
            "4",
            "DANet head, stride 8",
            danet.head,
            101.25 * GIGA,
            "theirs is about its convolutions without the attention products: "
            f"{_convolutions_of_danet(size) / GIGA:.2f}G of ours",
        )
    )
    for layers, width, published in (
        (1, 128, 0.00024),
        (3, 128, 0.00027),
        (5, 128, 0.00030),
        (7, 128, 0.00043),
        (5, 64, 0.00015),
        (5, 256, 0.00098),
    ):
        gated = count(at[16].replace(head="caa", gate_layers=layers, gate_width=width), size)
        one_vector = gated.gates / 33 / 2**30  # 33 positions an axis at 33 x 33
        fits = "which is theirs" if abs(one_vector - published) < 5e-6 else "which is not theirs either"
        rows.append(
            PaperRow(
                "1",
                f"channelization, {layers} x {width}",
                gated.gates,
                published * GIGA,
                "ours runs a gate at every row and column; "
                f"one pooled vector an axis would be {one_vector:.5f} x 2^30, {fits}",
            )
        )
    return rows


def _convolutions_of_danet(size: tuple[int, int]) -> int:
    """DANet's multiply-adds without its attention products and classifiers."""
    model, by_module = _by_module(
        ModelConfig(head="danet", backbone="resnet101", num_classes=59, output_stride=8), size
    )
    names = [name for name, module in model.head.named_modules() if isinstance(module, nn.Conv2d)]
    return sum(by_module[f"Segmenter.head.{name}"] for name in names)
