"""The PSPNet head: pyramid pooling (Zhao et al., Pyramid Scene Parsing Network, CVPR 2017)."""

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures, check_two_images
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection, pyramid_pooling

SCALES = (1, 2, 3, 6)
"""Bins per side of each average pool."""


class PyramidPooling(nn.Module):
    """Averages over grids of bins, projected, resized and joined with the features by a 3x3 convolution.

    Args:
        in_channels: channels of the features.
        channels: channels of the projections and of the result.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(projection(in_channels, channels, eps=EPSILON) for _ in SCALES)
        self.bottleneck = PyramidProjection(in_channels + len(SCALES) * channels, channels, kernel_size=3)

    def forward(self, features: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels, H, W)."""
        check_two_images(features, self.branches[0][1])  # type: ignore[index]
        pooled = pyramid_pooling(features, SCALES)  # (N, in_channels, s, s) each
        projected = [branch(averages) for branch, averages in zip(self.branches, pooled, strict=True)]
        fused: Tensor = self.bottleneck([features], projected)
        return fused


class PSPHead(FusionHead):
    """Pyramid pooling."""

    title = "PSPNet"
    needs_two_images = True
    without_attention = (
        "A PSPNet head has no attention. It classifies a pixel from the features around it and from averages over "
        "parts of the image."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        self.pooling = PyramidPooling(in_channels, config.channels)
        self.build_end(config.channels, config)

    def forward(self, features: Tensor) -> HeadFeatures:
        return self.end(self.pooling(features))
