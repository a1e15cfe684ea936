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
    views = ("column gate level", "row gate level", "both level", "both even", "as trained")
    flattens_gates = True
    conflict_wording = ConflictWording(
        lead="Channelized axial attention has no branches that classify: its channel attention is a factor of the "
        "spatial one. This study flattens its gates instead and shows what changes. A level gate has its mean over the "
        "image's rows (column gate) or columns (row gate), per channel: it weighs channels as before, but no "
        "longer depends on the position. An even gate has one value, its mean over channels too: it weighs nothing. A "
        "gate that is not flattened keeps its values.",
        lost="right with flattened gates, wrong as trained",
        won="right as trained, wrong with every flattening",
        disagree="the flattened ones disagree, neither lost nor won",
        caution="The network was not trained with flattened gates: this shows how it uses its gates, not what it would "
        "be if trained without them. The numbers do not compare with those of branches.",
    )


class AxialSEHead(AttentionHead):
    """Squeeze-and-excitation and axial attention in sequence: the sequential design of the paper's first figure."""

    title = "squeeze-and-excitation, then axial attention"
    branches = ("channel",)
    views = ("channel", "final")
    conflict_wording = ConflictWording(
        lead="The sequential design: channel attention and axial attention one after the other. A classifier behind a "
        "stop-gradient reads the output of the channel attention and changes nothing else.",
        lost="the channel branch is right, the final prediction is wrong",
        won="the final prediction is right, the channel branch is not",
        disagree=None,
        caution="The features of the channel attention are enough for what the branch has right; no part of the "
        "network was trained to preserve it. Compare lost pixels with won pixels.",
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
    what the channel attention knows, and changes nothing else.
    """

    def __init__(self, channels: int, *, key_channels: int, se_first: bool) -> None:
        super().__init__()
        self.squeeze_excitation = SqueezeExcitation(channels)
        self.axial = ChannelizedAxialAttention(
            channels, key_channels=key_channels, value_channels=channels, channelize=False
        )
        self.se_first = se_first

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C, H, W) -> two of the same shape."""
        if self.se_first:
            weighted: Tensor = self.squeeze_excitation(features)
            return self.axial(weighted), weighted.detach()
        weighted = self.squeeze_excitation(self.axial(features))
        return weighted, weighted.detach()
