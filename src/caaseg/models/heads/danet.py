"""The DANet head: position and channel attention in parallel (Fu et al., CVPR 2019)."""

from torch import Tensor, nn

from caaseg.attention import ChannelAttention, PositionAttention
from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import DROPOUT, ConflictWording, Head, HeadFeatures


class DANetHead(Head):
    """Position attention and channel attention in two branches, summed: the parallel design."""

    title = "DANet"
    branches = ("spatial", "channel")
    views = ("spatial", "channel", "fused")
    conflict_wording = ConflictWording(
        lead="The parallel design: position and channel attention side by side, each with a classifier of its own, and "
        "their sum, which is the prediction.",
        lost="a branch is right, the fusion is wrong",
        won="the fusion is right, neither branch is",
        disagree="the branches disagree, neither lost nor won",
        caution="A branch may be right by chance, which is more likely with two branches than with one. Compare lost "
        "pixels with won pixels, and compare only models with the same number of branches.",
    )
    without_attention = (
        "A DANet head has no attention along columns and rows. One branch attends to all pixels, the other to "
        "channels, and their outputs are added."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        channels = config.channels
        self.spatial_entry = projection(in_channels, channels, kernel_size=3)
        self.channel_entry = projection(in_channels, channels, kernel_size=3)
        self.position = PositionAttention(channels)
        self.channel = ChannelAttention()
        self.spatial_exit = projection(channels, channels, kernel_size=3)
        self.channel_exit = projection(channels, channels, kernel_size=3)
        self.dropout = nn.Dropout(DROPOUT)
        self.car = self.build_car(channels) if config.car else None
        self.branch_channels = channels
        self.out_channels = channels if self.car is None else self.car.out_channels

    def forward(self, features: Tensor) -> HeadFeatures:
        spatial = self.spatial_exit(self.position(self.spatial_entry(features)))  # (N, C, H, W)
        channel = self.channel_exit(self.channel(self.channel_entry(features)))  # (N, C, H, W)
        branches = {"spatial": self.dropout(spatial), "channel": self.dropout(channel)}
        fused = spatial + channel
        linear = None if self.car is None else self.car(fused)
        return HeadFeatures(self.dropout(fused if linear is None else linear), branches, linear)
