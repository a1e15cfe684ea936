"""Axial attention heads: plain, with squeeze-and-excitation, and channelized (CAA)."""

from torch import Tensor, nn

from caaseg.attention import ChannelizedAxialAttention, SqueezeExcitation
from caaseg.config import Architecture
from caaseg.models.heads.base import AttentionBlock, AttentionHead, ConflictWording


class AxialHead(AttentionHead):
    """Attention along columns, then along rows, without gates."""

    title = "axial attention"
    channelize = False

    def build_block(self, config: Architecture) -> nn.Module:
        return ChannelizedAxialAttention(
            config.channels,
            key_channels=config.key_channels,
            value_channels=config.channels,
            gate_layers=config.gate_layers,
            gate_width=config.gate_width,
            gate_activation=config.gate_activation,
            channelize=self.channelize,
            implementation=config.implementation,
            groups=config.groups,
        )


class CAAHead(AxialHead):
    """Channelized axial attention (Huang et al., AAAI 2022)."""

    title = "channelized axial attention"
    channelize = True
    car_channels = 256
    views = (
        "column gate averaged",
        "row gate averaged",
        "both averaged",
        "both averaged over channels too",
        "as trained",
    )
    averages_gates = True
    conflict_wording = ConflictWording(
        lead="Channelized axial attention has no branches with classifiers: its channel attention is a factor of the "
        "spatial attention. This study replaces its gates by their means and shows the effect. An averaged gate is the "
        "mean over image rows (column gate) or image columns (row gate), per channel: it still weights channels, but "
        "does not depend on the position. A gate that is averaged over channels too is a single number.",
        lost="right with averaged gates, wrong as trained",
        won="right as trained, wrong with all averaged gates",
        disagree="predictions with averaged gates disagree, neither lost nor won",
        caution="The network was not trained with averaged gates: this shows how it uses its gates, not how it would "
        "perform if trained without them. The numbers are not comparable with the numbers of branches.",
    )


class AxialSEHead(AttentionHead):
    """Squeeze-and-excitation and axial attention in sequence: the sequential design of the paper's first figure."""

    title = "squeeze-and-excitation, then axial attention"
    branches = ("channel",)
    views = ("channel", "final")
    conflict_wording = ConflictWording(
        lead="The sequential design: channel attention and axial attention one after the other. A classifier behind a "
        "stop-gradient reads the output of the channel attention and does not affect the rest of the network.",
        lost="the channel branch is right, the final prediction is wrong",
        won="the final prediction is right, the channel branch is not",
        disagree=None,
        caution="The features of the channel attention suffice for the pixels that its branch classifies correctly. No "
        "part of the network was trained to preserve this information. Compare lost pixels with won pixels.",
    )
    block: "SqueezedAxialAttention"

    def build_block(self, config: Architecture) -> nn.Module:
        return SqueezedAxialAttention(config.channels, key_channels=config.key_channels, se_first=config.se_first)

    def attend(self, features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        attended, channel = self.block(features)
        return attended, {"channel": channel}

    def attention_block(self) -> AttentionBlock:
        return self.block.axial


class SqueezedAxialAttention(nn.Module):
    """Channel attention and axial attention in sequence.

    The second output is the output of squeeze-and-excitation behind a stop-gradient: a classifier trained on it shows
    the information in the channel attention, and does not affect the rest of the network.
    """

    def __init__(self, channels: int, *, key_channels: int, se_first: bool) -> None:
        super().__init__()
        self.squeeze_excitation = SqueezeExcitation(channels)
        self.axial = ChannelizedAxialAttention(
            channels, key_channels=key_channels, value_channels=channels, channelize=False
        )
        self.se_first = se_first

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C, H, W) -> two tensors of the same shape."""
        if self.se_first:
            weighted: Tensor = self.squeeze_excitation(features)
            return self.axial(weighted), weighted.detach()
        weighted = self.squeeze_excitation(self.axial(features))
        return weighted, weighted.detach()
