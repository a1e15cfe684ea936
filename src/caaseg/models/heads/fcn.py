"""The FCN head: 3x3 convolutions (Long et al., CVPR 2015). A single one is the baseline of the paper's figures."""

from torch import Tensor, nn

from caaseg.attention.projection import BN_EPSILON, projection
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.pyramid import PyramidProjection


class FCNHead(FusionHead):
    """3x3 convolutions; with `config.concat_input`, a further one of their concatenated input and output."""

    title = "FCN"
    without_attention = (
        "An FCN head has no attention. It classifies a pixel from the backbone's features right around it."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        channels = config.channels
        self.entry = projection(in_channels, channels, kernel_size=3)
        self.more = nn.Sequential(*(projection(channels, channels, kernel_size=3) for _ in range(config.num_convs - 1)))
        self.joint = (
            PyramidProjection(in_channels + channels, channels, kernel_size=3, eps=BN_EPSILON)
            if config.concat_input
            else None
        )
        self.build_end(channels, config)

    def forward(self, features: Tensor) -> HeadFeatures:
        convolved = self.more(self.entry(features))  # (N, C, H, W)
        if self.joint is not None:
            convolved = self.joint([features, convolved])
        return self.end(convolved)
