"""Heads: from a backbone's coarse feature to the feature that is classified, pixel by pixel.

All but FCN and DANet share the authors' frame and differ in the block alone, so that a comparison compares blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from caaseg.attention import (
    ChannelAttention,
    ChannelizedAxialAttention,
    PositionAttention,
    SelfAttention,
    SqueezeExcitation,
)
from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.image_level import ImageBiasedConvolution, mean_over_image

DROPOUT = 0.1


class HeadFeatures(NamedTuple):
    """What a head gives, each to its own classifier."""

    fused: Tensor  # (N, C, H, W), the head's result
    branches: dict[str, Tensor]  # name -> (N, C', H, W), what the conflict study looks at


class FCNHead(nn.Module):
    """A 3x3 convolution: the baseline of the paper's figures (Long et al., CVPR 2015)."""

    def __init__(self, in_channels: int, *, channels: int) -> None:
        super().__init__()
        self.entry = projection(in_channels, channels, kernel_size=3)
        self.dropout = nn.Dropout(DROPOUT)
        self.out_channels = channels
        self.branch_channels: dict[str, int] = {}

    def forward(self, features: Tensor) -> HeadFeatures:
        return HeadFeatures(self.dropout(self.entry(features)), {})


class AttentionHead(nn.Module):
    """The authors' frame around an attention block, with an image-level branch beside it.

    Args:
        in_channels: channels of the backbone's feature.
        block: (N, channels, H, W) -> (N, channels, H, W).
        channels: channels inside the frame.
    """

    def __init__(self, in_channels: int, block: nn.Module, *, channels: int) -> None:
        super().__init__()
        self.entry = projection(in_channels, channels, kernel_size=3)
        self.block = block
        self.exit = projection(channels, channels)
        self.image_level = projection(in_channels, channels)
        self.out_channels = 256
        self.bottleneck = projection(2 * channels, self.out_channels, kind=ImageBiasedConvolution)
        self.dropout = nn.Dropout(DROPOUT)
        self.branch_channels = {"channel": channels} if isinstance(block, SqueezedAxialAttention) else {}

    def forward(self, features: Tensor) -> HeadFeatures:
        norm = self.image_level[1]
        if norm.training and isinstance(norm, nn.BatchNorm2d) and features.shape[0] == 1:
            raise ValueError(
                "a batch of one image cannot be trained on: batch normalization of the image-level branch needs two; "
                "use two images or more a device, or keep batch normalization in evaluation mode"
            )
        entered = self.entry(features)  # (N, C, H, W)
        branches = {}
        if isinstance(self.block, SqueezedAxialAttention):
            attended, branches["channel"] = self.block(entered)
        else:
            attended = self.block(entered)
        image = self.image_level(mean_over_image(features))  # (N, C, 1, 1)
        both, *rest = self.bottleneck
        fused: Tensor = both(self.exit(attended), image)  # (N, 256, H, W)
        for module in rest:
            fused = module(fused)
        return HeadFeatures(self.dropout(fused), branches)


class SqueezedAxialAttention(nn.Module):
    """Channel attention and axial attention one after the other: the sequential design of the paper's first figure.

    Its second result is what squeeze-and-excitation gave, behind a stop-gradient: a classifier that learns from it
    shows what the channel attention knew, and changes nothing else.
    """

    def __init__(self, channels: int, *, key_channels: int, se_first: bool) -> None:
        super().__init__()
        self.squeeze_excitation = SqueezeExcitation(channels)
        self.axial = ChannelizedAxialAttention(
            channels, key_channels=key_channels, value_channels=channels, channelize=False
        )
        self.se_first = se_first

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        if self.se_first:
            weighted: Tensor = self.squeeze_excitation(features)
            return self.axial(weighted), weighted.detach()
        weighted = self.squeeze_excitation(self.axial(features))
        return weighted, weighted.detach()


class DANetHead(nn.Module):
    """Position and channel attention side by side, summed (Fu et al., CVPR 2019): the parallel design."""

    def __init__(self, in_channels: int, *, channels: int) -> None:
        super().__init__()
        self.spatial_entry = projection(in_channels, channels, kernel_size=3)
        self.channel_entry = projection(in_channels, channels, kernel_size=3)
        self.position = PositionAttention(channels)
        self.channel = ChannelAttention()
        self.spatial_exit = projection(channels, channels, kernel_size=3)
        self.channel_exit = projection(channels, channels, kernel_size=3)
        self.dropout = nn.Dropout(DROPOUT)
        self.out_channels = channels
        self.branch_channels = {"spatial": channels, "channel": channels}

    def forward(self, features: Tensor) -> HeadFeatures:
        spatial = self.spatial_exit(self.position(self.spatial_entry(features)))  # (N, C, H, W)
        channel = self.channel_exit(self.channel(self.channel_entry(features)))  # (N, C, H, W)
        branches = {"spatial": self.dropout(spatial), "channel": self.dropout(channel)}
        return HeadFeatures(self.dropout(spatial + channel), branches)


Head = FCNHead | AttentionHead | DANetHead


def _axial(in_channels: int, options: Architecture, *, channelize: bool) -> AttentionHead:
    block = ChannelizedAxialAttention(
        options.channels,
        key_channels=options.key_channels,
        value_channels=options.channels,
        gate_layers=options.gate_layers,
        gate_width=options.gate_width,
        gate_activation=options.gate_activation,
        channelize=channelize,
        implementation=options.implementation,
        groups=options.groups,
    )
    return AttentionHead(in_channels, block, channels=options.channels)


def _self_attention(in_channels: int, options: Architecture, *, channelize: bool) -> AttentionHead:
    block = SelfAttention(
        options.channels,
        key_channels=options.key_channels,
        value_channels=options.channels,
        channelize=channelize,
        gate_layers=options.gate_layers,
        gate_width=options.gate_width,
        gate_activation=options.gate_activation,
    )
    return AttentionHead(in_channels, block, channels=options.channels)


def _axial_se(in_channels: int, options: Architecture) -> AttentionHead:
    block = SqueezedAxialAttention(options.channels, key_channels=options.key_channels, se_first=options.se_first)
    return AttentionHead(in_channels, block, channels=options.channels)


HEADS: dict[str, Callable[[int, Architecture], Head]] = {
    "fcn": lambda in_channels, options: FCNHead(in_channels, channels=options.channels),
    "axial": lambda in_channels, options: _axial(in_channels, options, channelize=False),
    "axial_se": _axial_se,
    "caa": lambda in_channels, options: _axial(in_channels, options, channelize=True),
    "self_attention": lambda in_channels, options: _self_attention(in_channels, options, channelize=False),
    "channelized_self_attention": lambda in_channels, options: _self_attention(in_channels, options, channelize=True),
    "danet": lambda in_channels, options: DANetHead(in_channels, channels=options.channels),
}
