"""Pixel attention: the attention weights of one pixel along its column, along its row, and over the image.

Shapes: H rows and W columns of the feature map, C its channels. A pixel of the image belongs to the nearest position
of the feature map, called its cell. Attention is computed at the size at which the image is predicted.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from caaseg.attention import SelfAttention
from caaseg.attention.axial import softmax_scores
from caaseg.attention.gate import apply_gate
from caaseg.attention.spatial import as_pixels
from caaseg.errors import CaasegError
from caaseg.models.heads.base import AttentionBlock
from caaseg.models.image_size import ImageSize
from caaseg.models.predictor import Predictor
from caaseg.models.result import Predictable
from caaseg.models.segmenter import Segmenter
from caaseg.models.windows import Size, labels_from_parts

PLACE_FRACTION = 1 / 12
"""Width of an attended region, as a fraction of the longer side of the feature map."""


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
    maps: AxialMaps | SelfAttentionMaps | None  # None without attention; `without_maps` is then the reason
    predicted_size: Size  # height and width at which the image was predicted
    without_maps: str = ""  # reason why there are no maps

    @property
    def size(self) -> Size:
        """Height and width of the image."""
        return self.labels.shape[0], self.labels.shape[1]

    def at(self, pixel: tuple[int, int]) -> PixelAttention | None:
        """Return the attention of a pixel of the image, given as (row, column)."""
        if self.maps is None:
            return None
        check_inside(pixel, self.size)
        resized = (
            min(max(round((p + 0.5) * inner / length - 0.5), 0), inner - 1)  # pixel centers, as in `resize_images`
            for p, inner, length in zip(pixel, self.predicted_size, self.size, strict=True)
        )
        row, column = resized
        return self.maps.at(nearest_cell((row, column), self.predicted_size, self.maps.size))

    def cell_centers(self) -> tuple[Tensor, Tensor]:
        """Return the row of the image at the center of each row of cells, and the same for columns, as floats.

        A pixel covers the positions from its index to its index + 1.
        """
        assert self.maps is not None
        row, column = (
            (torch.linspace(0, inner - 1, cells, dtype=torch.float64) + 0.5) * length / inner
            for cells, inner, length in zip(self.maps.size, self.predicted_size, self.size, strict=True)
        )
        return row, column

    def cell_labels(self) -> Tensor:
        """Return the predicted class at the center of each cell, (H, W) of the feature map."""
        rows, columns = (centers.floor().long() for centers in self.cell_centers())
        return self.labels[rows][:, columns]


class Place(NamedTuple):
    """A region of cells that a pixel attends to."""

    cell: tuple[int, int]  # the cell in it with the largest weight
    weight: float  # sum of the weights in the region
    label: int  # class with the largest weight in the region


def most_attended(attention: PixelAttention, labels: Tensor, number: int = 3) -> tuple[float, list[Place]]:
    """Return the weight of a pixel's own surroundings, and the square regions elsewhere with the largest weights.

    Regions do not overlap. Each is PLACE_FRACTION of the longer side of the feature map wide.

    Args:
        attention: attention of the pixel.
        labels: class of each cell, (H, W).
        number: maximum number of regions.
    """
    remaining, places = attention.reach.clone(), list[Place]()
    radius = max(1, round(max(remaining.shape) * PLACE_FRACTION / 2))
    own = _square(attention.cell, radius)
    own_weight = remaining[own].sum().item()
    remaining[own] = 0
    for _ in range(number):
        width = 2 * radius + 1
        sums = torch.nn.functional.avg_pool2d(remaining[None, None], width, 1, radius, divisor_override=1)[0, 0]
        square = _square(divmod(int(sums.argmax()), sums.shape[1]), radius)
        weights = remaining[square]
        if weights.sum() <= 0:
            break
        by_class = weight_per_class(weights, labels[square])
        peak = divmod(int(weights.argmax()), weights.shape[1])
        cell = (square[0].start + peak[0], square[1].start + peak[1])
        places.append(Place(cell, weights.sum().item(), int(by_class.argmax())))
        remaining[square] = 0
    return own_weight, places


def weight_per_class(weights: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the weights of the cells of each class: (H, W), (H, W) -> (K,)."""
    return torch.bincount(labels.flatten().long(), weights.flatten().double())


def _square(cell: Sequence[int], radius: int) -> tuple[slice, slice]:
    row, column = (slice(max(0, k - radius), k + radius + 1) for k in cell)
    return row, column


def axial_reach(column_weights: Tensor, row_weights: Tensor, cell: tuple[int, int]) -> Tensor:
    """Return the weight of every value in axial attention at cell (i, j): (W, H, H) and (H, W, W) -> (H, W).

    Eq. (5) sums along columns first, then sums these results along the row. So the value at (m, n) has the weight

        reach[m, n] = row_weights[i, j, n] * column_weights[n, i, m]

    Gates multiply the sum channel by channel and do not change these weights.
    """
    i, j = cell
    return (row_weights[i, j][:, None] * column_weights[:, i]).T


def nearest_cell(pixel: tuple[int, int], size: Size, cells: Size) -> tuple[int, int]:
    """Return the cell nearest to a pixel, with aligned corners as in `resize`."""
    check_inside(pixel, size)
    row, column = (round(p * (n - 1) / max(1, length - 1)) for p, length, n in zip(pixel, size, cells, strict=True))
    return row, column


def check_inside(pixel: tuple[int, int], size: Size) -> None:
    """Raise CaasegError if a pixel is outside an image."""
    for position, length, axis in zip(pixel, size, ("row", "column"), strict=True):
        if not 0 <= position < length:
            raise CaasegError(f"{axis} {position} is outside the image; expected 0 to {length - 1}")


def predict_with_attention(model: Predictable, image: Tensor, *, size: ImageSize = "auto") -> ImageAttention:
    """Predict an image, (3, H, W) uint8, as `model.predict` does, and return the prediction with its attention.

    Not thread-safe for one model: it registers a hook on the attention block during the prediction.

    Args:
        model: the model; exported models have no attention to show.
        image: uint8, (3, H, W).
        size: size at which the image is predicted, as for `Predictor`.
    """
    network = model.for_inference()
    predictor = Predictor(network, size=size)
    image_size = (image.shape[1], image.shape[2])
    block, reason = _block_to_explain(network, is_tiled=predictor.is_tiled(image_size))
    inputs: list[Tensor] = []
    hook = (
        nullcontext()
        if block is None
        else block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    )
    with hook:
        labels = labels_from_parts(predictor.parts(image), image_size)
    with torch.inference_mode():
        maps = None if block is None else _maps(block, inputs[0])
    return ImageAttention(labels, maps, predictor.predicted_size(image_size), reason)


def _block_to_explain(model: nn.Module, *, is_tiled: bool) -> tuple[AttentionBlock | None, str]:
    """Return the attention block of a model, or None and the reason."""
    if not isinstance(model, Segmenter):
        return None, "An exported model does not show its attention; open the model it was exported from."
    block = model.head.attention_block()
    if block is None:
        return None, model.head.without_attention
    if is_tiled:
        return None, "The image was predicted in windows, each with its own attention; choose a smaller size to see it."
    return block, ""


def _maps(block: AttentionBlock, features: Tensor) -> AxialMaps | SelfAttentionMaps:
    if isinstance(block, SelfAttention):
        keys, values = as_pixels(block.keys(features)), as_pixels(block.values(features))
        return SelfAttentionMaps(block, keys, values, (features.shape[2], features.shape[3]))
    maps = block.explain(features)
    gates = [None if gate is None else gate[0].cpu() for gate in (maps.column_gate, maps.row_gate)]
    return AxialMaps(maps.column_weights[0].cpu(), maps.row_weights[0].cpu(), *gates)
