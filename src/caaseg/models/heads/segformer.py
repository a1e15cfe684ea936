"""The SegFormer head: an MLP on all stages (Xie et al., SegFormer: Simple and Efficient Design, NeurIPS 2021)."""

from collections.abc import Sequence

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection


class SegFormerHead(FusionHead):
    """Projections of all backbone stages, joined by a 1x1 convolution."""

    title = "SegFormer"
    levels = (0, 1, 2, 3)
    without_attention = (
        "A SegFormer head has no attention. It classifies a pixel from the features of all backbone stages at this "
        "pixel."
    )

    def __init__(self, in_channels: Sequence[int], config: Architecture) -> None:
        super().__init__()
        channels = config.channels
        self.projections = nn.ModuleList(projection(level, channels, eps=EPSILON) for level in in_channels)
        self.bottleneck = PyramidProjection(len(in_channels) * channels, channels, kernel_size=1)
        self.build_end(channels, config)

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        finest, *others = [layer(level) for layer, level in zip(self.projections, features, strict=True)]
        return self.end(self.bottleneck([finest], others))  # (N, channels, H, W)
