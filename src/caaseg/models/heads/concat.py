"""Base class of heads that concatenate their input with the result of a context block, as in mmsegmentation."""

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection


class ConcatHead(FusionHead):
    """A 3x3 convolution before and after a context block, then one of the result concatenated with the head's input.

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
        self.join = PyramidProjection(in_channels + channels, channels, kernel_size=3)
        self.build_end(channels, config)

    def forward(self, features: Tensor) -> HeadFeatures:
        return self.end(self.join([features, self.exit(self.block(self.entry(features)))]))  # (N, C, H, W)
