"""Self-attention heads: plain (non-local), and channelized like CAA."""

from torch import nn

from caaseg.attention import SelfAttention
from caaseg.config import Architecture
from caaseg.models.heads.base import AttentionHead


class SelfAttentionHead(AttentionHead):
    """Attention of every pixel to all pixels."""

    title = "self-attention"
    channelize = False

    def build_block(self, config: Architecture) -> nn.Module:
        return SelfAttention(
            config.channels,
            key_channels=config.key_channels,
            value_channels=config.channels,
            channelize=self.channelize,
            gate_layers=config.gate_layers,
            gate_width=config.gate_width,
            gate_activation=config.gate_activation,
        )


class ChannelizedSelfAttentionHead(SelfAttentionHead):
    """Self-attention with a channel gate per pixel."""

    title = "channelized self-attention"
    channelize = True
