"""DeepLab heads: atrous spatial pyramid pooling (ASPP), without and with a decoder.

DeepLabV3 is Chen et al., Rethinking Atrous Convolution for Semantic Image Segmentation, 2017; DeepLabV3+ is Chen et
al., Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation, ECCV 2018.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, cat, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures, check_two_images, mean_over_image
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection
from caaseg.models.resize import resize

RATES = (12, 24, 36)
"""Dilation rates at output stride 8."""


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: convolutions with several dilation rates, and an image-level branch.

    Args:
        in_channels: channels of the features.
        config: architecture settings; `config.channels` is the width of each branch and of the result.
        separable: use depthwise separable convolutions for the dilated branches.
    """

    def __init__(self, in_channels: int, config: Architecture, *, separable: bool) -> None:
        super().__init__()
        channels = config.channels
        rates = config.aspp_rates or [rate * 8 // config.output_stride for rate in RATES]
        self.image_level = projection(in_channels, channels, eps=EPSILON)
        self.pointwise = projection(in_channels, channels, eps=EPSILON)
        self.dilated = nn.ModuleList(
            separable_projection(in_channels, channels, rate)
            if separable
            else projection(in_channels, channels, kernel_size=3, dilation=rate, eps=EPSILON)
            for rate in rates
        )
        self.bottleneck = PyramidProjection((2 + len(rates)) * channels, channels, kernel_size=3)

    def forward(self, features: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels, H, W)."""
        check_two_images(features, self.image_level[1])
        image = self.image_level(mean_over_image(features))  # (N, C, 1, 1)
        maps = [branch(features) for branch in (self.pointwise, *self.dilated)]  # (N, C, H, W) each
        fused: Tensor = self.bottleneck(maps, [image])
        return fused


def separable_projection(in_channels: int, out_channels: int, rate: int = 1) -> nn.Sequential:
    """Return a depthwise 3x3 projection, with a dilation rate, followed by a 1x1 projection."""
    return nn.Sequential(
        projection(in_channels, in_channels, kernel_size=3, dilation=rate, groups=in_channels, eps=EPSILON),
        projection(in_channels, out_channels, eps=EPSILON),
    )


class DeepLabV3Head(FusionHead):
    """Atrous spatial pyramid pooling."""

    title = "DeepLabV3"
    needs_two_images = True
    without_attention = (
        "A DeepLabV3 head has no attention. It classifies a pixel from features at several distances around it and "
        "from an average over the image."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        self.aspp = ASPP(in_channels, config, separable=False)
        self.build_end(config.channels, config)

    def forward(self, features: Tensor) -> HeadFeatures:
        return self.end(self.aspp(features))


class DeepLabV3PlusHead(FusionHead):
    """Atrous spatial pyramid pooling with separable convolutions, refined with the features of the first stage."""

    title = "DeepLabV3+"
    levels = (0, -1)
    needs_two_images = True
    without_attention = (
        "A DeepLabV3+ head has no attention. It classifies a pixel from features at several distances around it, "
        "from fine features at the pixel, and from an average over the image."
    )
    fine_channels: ClassVar[int] = 48
    """Channels that the fine features are projected to."""

    def __init__(self, in_channels: Sequence[int], config: Architecture) -> None:
        super().__init__()
        fine, coarse = in_channels
        channels = config.channels
        self.aspp = ASPP(coarse, config, separable=True)
        self.fine = projection(fine, self.fine_channels, eps=EPSILON)
        self.refine = nn.Sequential(
            separable_projection(channels + self.fine_channels, channels), separable_projection(channels, channels)
        )
        self.build_end(channels, config)

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        fine, coarse = features  # (N, C', H, W) and (N, C, h, w)
        upsampled = resize(self.aspp(coarse), fine.shape[2:], align_corners=False)
        return self.end(self.refine(cat([upsampled, self.fine(fine)], dim=1)))  # (N, channels, H, W)
