"""Channelized axial attention and the attention modules it is compared with. Depends on torch only."""

from caaseg.attention.axial import axial_attention
from caaseg.attention.channelized import (
    AxialMaps,
    ChannelizedAxialAttention,
    Implementation,
    channelized_axial_attention,
)
from caaseg.attention.dual import (
    ChannelAttention,
    DualMaps,
    PositionAttention,
    SqueezeExcitation,
    channel_attention,
    position_attention,
    squeeze_excitation,
)
from caaseg.attention.gate import Activation, ChannelGate, Gate
from caaseg.attention.spatial import SelfAttention, SpatialMaps, channelized_self_attention, self_attention

__all__ = [
    "Activation",
    "AxialMaps",
    "ChannelAttention",
    "ChannelGate",
    "ChannelizedAxialAttention",
    "DualMaps",
    "Gate",
    "Implementation",
    "PositionAttention",
    "SelfAttention",
    "SpatialMaps",
    "SqueezeExcitation",
    "axial_attention",
    "channel_attention",
    "channelized_axial_attention",
    "channelized_self_attention",
    "position_attention",
    "self_attention",
    "squeeze_excitation",
]
