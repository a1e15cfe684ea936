"""What a pixel of an image looks at: along its column, along its row, and over the image by both together.

Shapes: H rows and W columns of the feature map that attends, C its channels. A pixel of the image stands for the cell
of that map that lies nearest to it.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from caaseg.attention import SelfAttention
from caaseg.attention.axial import softmax_scores
from caaseg.attention.gate import apply_gate
from caaseg.attention.spatial import as_pixels
from caaseg.models.heads.base import AttentionBlock
from caaseg.models.predictor import Predictor
from caaseg.models.segmenter import Segmenter
from caaseg.models.windows import Size


class PixelAttention(NamedTuple):
    """How the result at one pixel was made. Weights sum to one."""

    cell: tuple[int, int]  # row and column of the pixel in the feature map
    column: Tensor | None  # (H,), weights along its column; None where attention goes over all pixels at once
    row: Tensor | None  # (W,), weights along its row
    reach: Tensor  # (H, W), the weight of every cell's values
    gates: Tensor | None  # (C,), what its channels were multiplied by; None without gates


class AxialView(NamedTuple):
    """What axial attention did with an image."""

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


class SpatialView(NamedTuple):
    """What self-attention did with an image. Its weights are made when asked for: all of them are (HW)^2 numbers."""

    block: SelfAttention
    keys: Tensor  # (1, HW, D)
    values: Tensor  # (1, HW, C)
    size: Size

    def at(self, cell: tuple[int, int]) -> PixelAttention:
        index = cell[0] * self.size[1] + cell[1]
        with torch.inference_mode():
            weights = softmax_scores(self.keys[:, index : index + 1], self.keys)  # (1, 1, HW)
            gates = None
            if self.block.gate is not None:
                gathered = weights.to(self.values.dtype) @ self.values  # (1, 1, C)
                gates = apply_gate(self.block.gate, gathered / self.values.shape[1], "gate")[0, 0].cpu()
        return PixelAttention(cell, None, None, weights.view(self.size).cpu(), gates)


class AttendedImage(NamedTuple):
    """A prediction, and the attention that it was made with."""

    labels: Tensor  # (H, W) of the image, uint8
    view: AxialView | SpatialView | None  # None where the head has no attention that a pixel could be asked about

    def at(self, pixel: tuple[int, int]) -> PixelAttention | None:
        """The attention of a pixel of the image, given as row and column."""
        if self.view is None:
            return None
        size = (self.labels.shape[0], self.labels.shape[1])
        return self.view.at(cell_of(pixel, size, self.view.size))


def axial_reach(column_weights: Tensor, row_weights: Tensor, cell: tuple[int, int]) -> Tensor:
    """The weight of every value in plain axial attention at cell (i, j): (W, H, H) and (H, W, W) -> (H, W).

    Eq. (5) gathers along the row what was gathered along the columns, so the value at (m, n) counts

        reach[m, n] = row_weights[i, j, n] * column_weights[n, i, m]

    times. Gates multiply the sum, channel by channel, and change nothing about where it comes from.
    """
    i, j = cell
    return (row_weights[i, j][:, None] * column_weights[:, i]).T


def cell_of(pixel: tuple[int, int], size: Size, cells: Size) -> tuple[int, int]:
    """The cell nearest to a pixel: the corners of the map are the corners of the image, as in `resize`."""
    for place, length, axis in zip(pixel, size, ("row", "column"), strict=True):
        if not 0 <= place < length:
            raise ValueError(f"{axis} {place} is outside the image; expected 0 to {length - 1}")
    row, column = (
        round(place * (count - 1) / max(1, length - 1)) for place, length, count in zip(pixel, size, cells, strict=True)
    )
    return row, column


def attend(model: Segmenter, image: Tensor) -> AttendedImage:
    """Predict an image, (3, H, W) uint8, and keep what its head attended with, for any pixel to be asked about.

    Not for several threads with one model at a time: it listens to what the attention is given.
    """
    block = model.head.attention_block()
    heard: list[Tensor] = []
    listening = (
        nullcontext() if block is None else block.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    )
    with listening:
        labels = Predictor(model).scores(image[None]).argmax(1)[0].to(torch.uint8).cpu()
    with torch.inference_mode():
        return AttendedImage(labels, None if block is None else _view(block, heard[0]))


def _view(block: AttentionBlock, features: Tensor) -> AxialView | SpatialView:
    if isinstance(block, SelfAttention):
        keys, values = as_pixels(block.keys(features)), as_pixels(block.values(features))
        return SpatialView(block, keys, values, (features.shape[2], features.shape[3]))
    maps = block.explain(features)
    gates = [None if gate is None else gate[0].cpu() for gate in (maps.column_gate, maps.row_gate)]
    return AxialView(maps.column_weights[0].cpu(), maps.row_weights[0].cpu(), *gates)
