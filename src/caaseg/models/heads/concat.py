"""Parts of heads that concatenate feature maps, as mmsegmentation builds them.

Shapes: N batch, C channels, H rows, W columns.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import DROPOUT, Head, HeadFeatures

EPSILON = 1e-5
"""Epsilon of batch normalization in mmsegmentation."""


def resize_to(features: Tensor, other: Tensor) -> Tensor:
    """Resize a feature map bilinearly to the size of another. Corners are not aligned, as in mmsegmentation."""
    size = other.shape[2:]
    return features if features.shape[2:] == size else F.interpolate(features, size, mode="bilinear")


class ConcatConvolution(nn.Conv2d):
    """Convolution of concatenated feature maps, as a sum of one convolution per map.

    The concatenated map, which training would store, is never built.
    """

    def forward(self, *maps: Tensor) -> Tensor:
        """Maps (N, C, H, W) of any number of channels, together in_channels -> (N, out_channels, H, W)."""
        assert not isinstance(self.padding, str)
        first, *others = maps
        end = first.shape[1]
        result = F.conv2d(first, self.weight[:, :end], self.bias, padding=self.padding)
        for features in others:
            start, end = end, end + features.shape[1]
            result = result + F.conv2d(features, self.weight[:, start:end], padding=self.padding)
        return result


class Join(nn.Sequential):
    """Modules in sequence, of which the first joins several feature maps."""

    def forward(self, *maps: Tensor) -> Tensor:
        """Maps (N, C, H, W) -> (N, C', H, W)."""
        first, *others = self
        result: Tensor = first(*maps)
        for module in others:
            result = module(result)
        return result


def concat_projection(in_channels: int, out_channels: int, *, kernel_size: int = 1) -> Join:
    """Return a `projection` of several maps, which have `in_channels` channels together."""
    return Join(*projection(in_channels, out_channels, kernel_size=kernel_size, kind=ConcatConvolution, eps=EPSILON))


class ConcatHead(Head):
    """3x3 convolutions before and after a context block, and one of their result concatenated with the head's input.

    Args:
        in_channels: channels of the backbone's coarse feature map.
        config: architecture settings; `config.channels` is the width of the block.
        block: the context block, (N, width, H, W) -> the same shape.
        out_channels: channels of the last convolutions; None for `config.channels`.
    """

    def __init__(
        self, in_channels: int, config: Architecture, block: nn.Module, out_channels: int | None = None
    ) -> None:
        super().__init__()
        width = config.channels
        channels = width if out_channels is None else out_channels
        self.entry = projection(in_channels, width, kernel_size=3, eps=EPSILON)
        self.block = block
        self.exit = projection(width, channels, kernel_size=3, eps=EPSILON)
        self.join = concat_projection(in_channels + channels, channels, kernel_size=3)
        self.dropout = nn.Dropout(DROPOUT)
        self.car = self.build_car(channels) if config.car else None
        self.out_channels = channels if self.car is None else self.car.out_channels

    def forward(self, features: Tensor) -> HeadFeatures:
        joined = self.join(features, self.exit(self.block(self.entry(features))))  # (N, C, H, W)
        linear = None if self.car is None else self.car(joined)
        return HeadFeatures(self.dropout(joined if linear is None else linear), {}, linear)
