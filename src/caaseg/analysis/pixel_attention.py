"""Pixel attention: the attention weights of one pixel along its column, along its row, and over the image.

Shapes: H rows and W columns of the feature map, C its channels. A pixel of the image belongs to the nearest position
of the feature map, called its cell.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from caaseg.attention import SelfAttention
from caaseg.attention.axial import softmax_scores
from caaseg.attention.gate import apply_gate
from caaseg.attention.spatial import as_pixels
from caaseg.errors import CaasegError
from caaseg.models.heads.base import AttentionBlock
from caaseg.models.predictor import Predictor
from caaseg.models.segmenter import Segmenter
from caaseg.models.windows import Size

UNLIMITED = (1 << 31, 1 << 31)
"""Window that no image exceeds: the attention is that of the whole image."""


class PixelAttention(NamedTuple):
    """Attention weights and gates of one pixel. Weights sum to one."""

    cell: tuple[int, int]  # row and column in the feature map
    column: Tensor | None  # (H,), weights along its column; None for self-attention over all positions
    row: Tensor | None  # (W,), weights along its row; None for self-attention
    reach: Tensor  # (H, W), weight of the value at every position
    gates: Tensor | None  # (C,), factors of its channels; None without gates


class AxialMaps(NamedTuple):
    """Axial attention weights and gates of an image."""

    column_weights: Tensor  # (W, H, H), of row i to row m within each column
    row_weights: Tensor  # (H, W, W), of column j to column n within each row
    column_gate: Tensor | None  # (H, C)
    row_gate: Tensor | None  # (W, C)

    @property
    def size(self) -> Size:
        return self.row_weights.shape[0], self.row_weights.shape[1]

    def at(self, cell: tuple[int, int]) -> PixelAttention:
        i, j = cell
        gated = self.column_gate is not None and self.row_gate is not None
        return PixelAttention(
            cell=cell,
            column=self.column_weights[j, i],
            row=self.row_weights[i, j],
            reach=axial_reach(self.column_weights, self.row_weights, cell),
            gates=self.column_gate[i] * self.row_gate[j] if gated else None,  # type: ignore[index]
        )


class SelfAttentionMaps(NamedTuple):
    """Keys and values of self-attention. Weights are computed per pixel: all of them would be (HW)^2 numbers."""

    block: SelfAttention
    keys: Tensor  # (1, HW, D)
    values: Tensor  # (1, HW, C)
    size: Size

    @torch.inference_mode()
    def at(self, cell: tuple[int, int]) -> PixelAttention:
        index = cell[0] * self.size[1] + cell[1]
        weights = softmax_scores(self.keys[:, index : index + 1], self.keys)  # (1, 1, HW)
        gates = None
        if self.block.gate is not None:
            gathered = weights.to(self.values.dtype) @ self.values  # (1, 1, C)
            gates = apply_gate(self.block.gate, gathered / self.values.shape[1], "gate")[0, 0].cpu()
        return PixelAttention(cell, None, None, weights.view(self.size).cpu(), gates)


class ImageAttention(NamedTuple):
    """A prediction and the attention that produced it."""

    labels: Tensor  # (H, W) of the image, uint8
    maps: AxialMaps | SelfAttentionMaps | None  # None if the head has no such attention

    def at(self, pixel: tuple[int, int]) -> PixelAttention | None:
        """Return the attention of a pixel of the image, given as (row, column)."""
        if self.maps is None:
            return None
        size = (self.labels.shape[0], self.labels.shape[1])
        return self.maps.at(nearest_cell(pixel, size, self.maps.size))


def axial_reach(column_weights: Tensor, row_weights: Tensor, cell: tuple[int, int]) -> Tensor:
    """Return the weight of every value in axial attention at cell (i, j): (W, H, H) and (H, W, W) -> (H, W).

    Eq. (5) sums along the row the results of the sums along the columns, so the value at (m, n) has the weight

        reach[m, n] = row_weights[i, j, n] * column_weights[n, i, m]

    Gates multiply the sum channel by channel and do not change these weights.
    """
    i, j = cell
    return (row_weights[i, j][:, None] * column_weights[:, i]).T


def nearest_cell(pixel: tuple[int, int], size: Size, cells: Size) -> tuple[int, int]:
    """Return the cell nearest to a pixel, with aligned corners as in `resize`."""
    for position, length, axis in zip(pixel, size, ("row", "column"), strict=True):
        if not 0 <= position < length:
            raise CaasegError(f"{axis} {position} is outside the image; expected 0 to {length - 1}")
    row, column = (round(p * (n - 1) / max(1, length - 1)) for p, length, n in zip(pixel, size, cells, strict=True))
    return row, column


def predict_with_attention(model: Segmenter, image: Tensor) -> ImageAttention:
    """Predict an image, (3, H, W) uint8, and return the prediction with its attention.

    Not thread-safe for one model: it registers a hook on the attention block during the prediction.
    """
    block = model.head.attention_block()
    inputs: list[Tensor] = []
    hook = (
        nullcontext()
        if block is None
        else block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    )
    with hook:
        labels = Predictor(model, window=UNLIMITED).labels(image[None])[0].cpu()
    with torch.inference_mode():
        return ImageAttention(labels, None if block is None else _maps(block, inputs[0]))


def _maps(block: AttentionBlock, features: Tensor) -> AxialMaps | SelfAttentionMaps:
    if isinstance(block, SelfAttention):
        keys, values = as_pixels(block.keys(features)), as_pixels(block.values(features))
        return SelfAttentionMaps(block, keys, values, (features.shape[2], features.shape[3]))
    maps = block.explain(features)
    gates = [None if gate is None else gate[0].cpu() for gate in (maps.column_gate, maps.row_gate)]
    return AxialMaps(maps.column_weights[0].cpu(), maps.row_weights[0].cpu(), *gates)
