"""Multiply-adds and parameters of a model, counted on the meta device, and the paper's FLOPs columns next to ours."""

from dataclasses import dataclass
from functools import cache
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
    """Multiply-adds for one image, and parameters."""

    backbone: int
    head: int  # everything after the backbone except the gates: head, decoder, classifiers, auxiliary branch
    gates: int
    parameters: int

    @property
    def total(self) -> int:
        return self.backbone + self.head + self.gates


def count(config: ModelConfig, size: tuple[int, int]) -> Count:
    """Count the multiply-adds for one image of (height, width). No weights are allocated."""
    model, by_module = _by_module(config, size)
    total, backbone = by_module["Segmenter"], by_module["Segmenter.backbone"]
    names = [f"Segmenter.{name}" for name, module in model.named_modules() if isinstance(module, ChannelGate)]
    gates = sum(by_module.get(name, 0) for name in names)
    parameters = sum(weight.numel() for weight in model.parameters())
    return Count(backbone=backbone, head=total - backbone - gates, gates=gates, parameters=parameters)


def _by_module(config: ModelConfig, size: tuple[int, int]) -> tuple[Segmenter, dict[str, int]]:
    """Return a model on the meta device, and the multiply-adds of each of its modules by name."""
    with torch.device("meta"):
        model = Segmenter(config).eval()
        images = torch.empty(1, 3, *size)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(images)
    return model, {name: sum(operations.values()) // 2 for name, operations in counter.get_flop_counts().items()}


class PaperRow(NamedTuple):
    """A number of the paper next to our count, both in multiply-adds, with the reason for the difference."""

    table: str
    part: str
    ours: float
    paper: float
    note: str


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Return the FLOPs columns of Tables 1 and 4 for ResNet-101 at 513 x 513, with our counts."""
    size = (513, 513)
    axial = {
        stride: ModelConfig(head="axial", backbone="resnet101", num_classes=59, output_stride=stride)
        for stride in (16, 8)
    }
    standard = {stride: count(config, size) for stride, config in axial.items()}
    rows = []
    for stride, published in ((16, 59.85), (8, 190.70)):
        authors = count(axial[stride].replace(resnet_variant="authors", multi_grid=(1, 2, 4)), size).backbone
        note = f"deep stem, strides in the stages' last blocks: {authors / GIGA / published:.1%} of the paper's count"
        part = f"backbone, stride {stride}"
        rows.append(PaperRow("4", f"{part}, authors' ResNet-101", authors, published * GIGA, note))
        note = "our default, because ImageNet weights are published for it: 7x7 stem, strides in the first blocks"
        rows.append(PaperRow("4", f"{part}, standard ResNet-101", standard[stride].backbone, published * GIGA, note))
    note = (
        "deduced: the paper's count is exactly 31 x 512^2 per pixel, less than the 3x3 entry convolution of the "
        "released head alone, so the authors counted another head"
    )
    for stride, published in ((16, 8.85), (8, 34.33)):
        rows.append(PaperRow("4", f"axial head, stride {stride}", standard[stride].head, published * GIGA, note))
        same = f"deduced: the paper counts no gates or auxiliary branch; it has {published}G for axial attention too"
        gated = count(axial[stride].replace(head="caa"), size)
        rows.append(PaperRow("4", f"CAA head, stride {stride}", gated.head + gated.gates, published * GIGA, same))
        aux = count(axial[stride].replace(head="caa", aux=True), size)
        what = f"CAA head with auxiliary branch, stride {stride}"
        rows.append(PaperRow("4", what, aux.head + aux.gates, published * GIGA, same))
    danet, by_module = _by_module(axial[8].replace(head="danet"), size)
    head = by_module["Segmenter"] - by_module["Segmenter.backbone"]
    names = [name for name, module in danet.head.named_modules() if isinstance(module, nn.Conv2d)]
    convolutions = sum(by_module[f"Segmenter.head.{name}"] for name in names)
    note = (
        "deduced: the paper's count is close to that of the convolutions alone, without the attention products: "
        f"{convolutions / GIGA:.2f}G of ours"
    )
    rows.append(PaperRow("4", "DANet head, stride 8", head, 101.25 * GIGA, note))
    note = "deduced: the paper's count is the sum of its ResNet-101 and its axial head in Table 4, 59.85G + 8.85G"
    whole = next(row.ours for row in rows if row.part == "backbone, stride 16, authors' ResNet-101") + standard[16].head
    rows.append(PaperRow("1", "axial attention with the authors' ResNet-101", whole, 68.7 * GIGA, note))
    for layers, width, published in (
        (1, 128, 0.00024),
        (3, 128, 0.00027),
        (5, 128, 0.00030),
        (7, 128, 0.00043),
        (5, 64, 0.00015),
        (5, 256, 0.00098),
    ):
        # The gates do not depend on the backbone, and a small backbone is counted faster.
        caa = axial[16].replace(head="caa", backbone="resnet18", gate_layers=layers, gate_width=width)
        gates = count(caa, size).gates
        one_vector = gates / 33 / 2**30  # features of 33 x 33 have 33 positions per axis
        fits = "which matches the paper" if abs(one_vector - published) < 5e-6 else "which does not match it either"
        note = (
            "our gates run at every row and column; deduced: "
            f"one pooled vector per axis would be {one_vector:.5f} x 2^30, {fits}"
        )
        rows.append(PaperRow("1", f"channelization, {layers} x {width}", gates, published * GIGA, note))
    return tuple(rows)
