"""The ANN head: non-local blocks whose keys are pooled (Zhu et al., Asymmetric Non-local Networks, ICCV 2019).

Shapes: N batch, C channels, D key channels, H rows, W columns, P pooled positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.attention.axial import as_rows
from caaseg.attention.projection import projection
from caaseg.attention.spatial import as_pixels, attend, from_pixels
from caaseg.config import Architecture
from caaseg.models.heads.base import DROPOUT, Head, HeadFeatures
from caaseg.models.heads.concat import EPSILON, Join

POOL_SIZES = (1, 3, 6, 8)


def pyramid_pooling(features: Tensor, sizes: Sequence[int]) -> Tensor:
    """Average over grids of cells of several sizes: (N, C, H, W) -> (N, P, C) for all cells of all grids in sequence.

    A cell contains the pixels that torch's adaptive average pooling assigns to it. Matrix products have deterministic
    gradients, unlike adaptive pooling on a GPU, and can be exported for images of any size.

    Args:
        features: (N, C, H, W).
        sizes: cells per side of each grid.
    """
    channels, height, width = features.shape[1:]
    rows = [_cells(height, size, features) for size in sizes]
    columns = [_cells(width, size, features) for size in sizes]
    lines = as_rows(features).reshape(-1, height, width * channels)  # (N, H, WC)
    sums = torch.cat([cells.inside for cells in rows]) @ lines  # (N, S, WC) for S = sum(sizes): one pass over the map
    grids = []
    for part, row, column in zip(torch.split(sums, list(sizes), dim=1), rows, columns, strict=True):
        means = (part / row.number).view(-1, part.shape[1], width, channels)  # (N, size, W, C)
        grids.append((column.inside @ means / column.number).flatten(1, 2))  # (N, size^2, C)
    return torch.cat(grids, dim=1)


class _Cells(NamedTuple):
    """Cells along one axis of a feature map."""

    inside: Tensor  # (size, length), 1 for positions in the cell and 0 for others
    number: Tensor  # (size, 1), number of positions in the cell


def _cells(length: int, size: int, features: Tensor) -> _Cells:
    """Return the cells along an axis; `features` has the dtype and device."""
    index = torch.arange(size, device=features.device)[:, None]
    first, end = index * length // size, ((index + 1) * length + size - 1) // size
    positions = torch.arange(length, device=features.device)
    return _Cells(((positions >= first) & (positions < end)).to(features.dtype), end - first)


class AsymmetricNonLocalBlock(nn.Module):
    """Attention of the pixels of one feature map to pooled positions of another; joined with the first map.

    Args:
        channels: channels of the map whose pixels attend.
        pooled_channels: channels of the pooled map; None if it is the same map, with the same projection.
        out_channels: channels of the result.
        key_channels: channels D of queries, keys and values.
        pool_sizes: cells per side of the grids of pooled positions.
        relu: apply ReLU to the result.
    """

    def __init__(
        self,
        channels: int,
        pooled_channels: int | None,
        *,
        out_channels: int,
        key_channels: int,
        pool_sizes: Sequence[int],
        relu: bool,
    ) -> None:
        super().__init__()
        self.keys = projection(pooled_channels or channels, key_channels, eps=EPSILON)
        self.queries = None if pooled_channels is None else projection(channels, key_channels, eps=EPSILON)
        self.values = nn.Linear(pooled_channels or channels, key_channels)
        self.join = Join(
            AttendedConvolution(channels, out_channels, key_channels),
            nn.BatchNorm2d(out_channels, eps=EPSILON),
            *([nn.ReLU(inplace=True)] if relu else []),
        )
        self.pool_sizes = tuple(pool_sizes)

    def forward(self, features: Tensor, pooled: Tensor) -> Tensor:
        """(N, C, H, W) and (N, C', H', W') -> (N, out_channels, H, W)."""
        keys = self.keys(pooled)
        queries = keys if self.queries is None else self.queries(features)
        # The projection of values is linear, so pooling may come first.
        values = self.values(pyramid_pooling(pooled, self.pool_sizes))  # (N, P, D)
        attended = attend(as_pixels(queries), pyramid_pooling(keys, self.pool_sizes), values, scale=None)
        joined: Tensor = self.join(features, from_pixels(attended, *features.shape[2:]))
        return joined


class AttendedConvolution(nn.Conv2d):
    """1x1 convolution of attended features, projected linearly to `channels`, concatenated with features.

    With weights A for the projected and B for the other channels, and the projection x -> W x + b, the result is
    (A W) x + A b + B y. So neither the projected features nor the concatenation is built.

    Args:
        channels: channels of the features, and of the projected features.
        out_channels: channels of the result.
        attended_channels: channels of the attended features.
    """

    def __init__(self, channels: int, out_channels: int, attended_channels: int) -> None:
        super().__init__(2 * channels, out_channels, 1, bias=False)
        nn.init.xavier_uniform_(self.weight)
        # Zeros, as in mmsegmentation: the attention has no effect at first.
        self.project_weight = nn.Parameter(torch.zeros(channels, attended_channels))
        self.project_bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor, attended: Tensor) -> Tensor:  # type: ignore[override]
        """(N, C, H, W) and (N, D, H, W) -> (N, out_channels, H, W)."""
        c = features.shape[1]
        matrix = self.weight[:, :c].flatten(1)  # (out, C)
        weight, bias = matrix @ self.project_weight, matrix @ self.project_bias
        if self.bias is not None:  # of a folded batch normalization
            bias = bias + self.bias
        return F.conv2d(features, self.weight[:, c:], bias) + F.conv2d(attended, weight[:, :, None, None])


class ANNHead(Head):
    """Attention of the last stage to pooled positions of the stage before it, then to pooled positions of its own.

    Args:
        in_channels: channels of the last two stages.
        config: architecture settings.
        key_channels: channels of queries, keys and values; None for half of `config.channels`.
        pool_sizes: cells per side of the grids of pooled positions.
    """

    title = "ANN"
    levels = (-2, -1)
    without_attention = (
        "An ANN head has no attention along columns and rows. Every pixel attends to averages over parts of the image."
    )

    def __init__(
        self,
        in_channels: tuple[int, ...],
        config: Architecture,
        *,
        key_channels: int | None = None,
        pool_sizes: Sequence[int] = POOL_SIZES,
    ) -> None:
        super().__init__()
        low, high = in_channels
        channels = config.channels
        keys = max(channels // 2, 1) if key_channels is None else key_channels
        self.fusion = AsymmetricNonLocalBlock(
            high, low, out_channels=high, key_channels=keys, pool_sizes=pool_sizes, relu=False
        )
        self.entry = projection(high, channels, kernel_size=3, eps=EPSILON)
        self.context = AsymmetricNonLocalBlock(
            channels, None, out_channels=channels, key_channels=keys, pool_sizes=pool_sizes, relu=True
        )
        self.dropout = nn.Dropout(DROPOUT)
        self.car = self.build_car(channels) if config.car else None
        self.out_channels = channels if self.car is None else self.car.out_channels

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        low, high = features
        entered = self.entry(self.dropout(self.fusion(high, low)))  # (N, C, H, W)
        result = self.context(entered, entered)
        linear = None if self.car is None else self.car(result)
        return HeadFeatures(self.dropout(result if linear is None else linear), {}, linear)
