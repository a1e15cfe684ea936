"""The FCN head: one 3x3 convolution (Long et al., CVPR 2015), the baseline of the paper's figures."""

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import DROPOUT, Head, HeadFeatures


class FCNHead(Head):
    """A 3x3 convolution."""

    title = "FCN"
    without_attention = (
        "An FCN head has no attention. It classifies a pixel from the backbone's features right around it."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        self.entry = projection(in_channels, config.channels, kernel_size=3)
        self.dropout = nn.Dropout(DROPOUT)
        self.car = self.build_car(config.channels) if config.car else None
        self.out_channels = config.channels if self.car is None else self.car.out_channels

    def forward(self, features: Tensor) -> HeadFeatures:
        entered = self.entry(features)  # (N, C, H, W)
        linear = None if self.car is None else self.car(entered)
        return HeadFeatures(self.dropout(entered if linear is None else linear), {}, linear)
