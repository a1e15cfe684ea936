"""The ANN head: non-local blocks whose keys are pooled (Zhu et al., Asymmetric Non-local Networks, ICCV 2019).

Shapes: N batch, C channels, D key channels, H rows, W columns, P pooled positions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.attention.spatial import as_pixels, attend, from_pixels
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.pyramid import EPSILON, pyramid_pooling

POOL_SIZES = (1, 3, 6, 8)


def pooled_positions(features: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the averages over the cells of several grids, (N, C, H, W) -> (N, P, C)."""
    return torch.cat([as_pixels(grid) for grid in pyramid_pooling(features, sizes)], dim=1)


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
        self.join = nn.Sequential(
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
        values = self.values(pooled_positions(pooled, self.pool_sizes))  # (N, P, D)
        attended = attend(as_pixels(queries), pooled_positions(keys, self.pool_sizes), values, scale=None)
        convolution, *rest = self.join
        joined: Tensor = convolution(features, from_pixels(attended, *features.shape[2:]))
        for module in rest:
            joined = module(joined)
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


class ANNHead(FusionHead):
    """Attention of the last stage to pooled positions of the stage before it, then to its own pooled positions.

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
        self.build_end(channels, config)

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        low, high = features
        entered = self.entry(self.dropout(self.fusion(high, low)))  # (N, C, H, W)
        return self.end(self.context(entered, entered))
