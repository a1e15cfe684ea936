"""Baselines of CAA: DANet's dual attention (Fu et al., CVPR 2019), squeeze-and-excitation (Hu et al., CVPR 2018).

Shapes: N batch, C channels, D key channels, H rows, W columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from caaseg.attention.axial import softmax_scores, without_autocast
from caaseg.attention.checks import check_maps, check_same_channels
from caaseg.attention.gate import ChannelGate, Gate, apply_gate
from caaseg.attention.spatial import as_pixels, self_attention


class DualMaps(NamedTuple):
    """Output and attention weights of one of DANet's modules."""

    output: Tensor  # (N, C, H, W)
    weights: Tensor  # (N, HW, HW) between pixels, or (N, C, C) between channels


def position_attention(features: Tensor, queries: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Add self-attention over pixels to the features, with a learned weight.

    Args:
        features: the residual, (N, C, H, W).
        queries: (N, D, H, W).
        keys: (N, D, H, W).
        values: features to gather, (N, C, H, W).
        scale: the learned weight, a scalar.

    Returns:
        (N, C, H, W) in the dtype of features.
    """
    check_maps(features=features, queries=queries, keys=keys, values=values)
    check_same_channels(features=features, values=values)
    return scale.to(features.dtype) * self_attention(queries, keys, values) + features


def channel_attention(features: Tensor, scale: Tensor) -> Tensor:
    """Add attention between channels to the features, with a learned weight.

    Channels attend to dissimilar channels: with S the dot products of channels, DANet's code takes the softmax of
    max(S) - S.

    Args:
        features: queries, keys and values, (N, C, H, W).
        scale: the learned weight, a scalar.

    Returns:
        (N, C, H, W) in the dtype of features.
    """
    check_maps(features=features)
    return _mix_channels(features, channel_weights(features), scale)


def channel_weights(features: Tensor) -> Tensor:
    """Return the attention of channel c to channel d, (N, C, H, W) -> (N, C, C), softmaxed over d."""
    channels = features.flatten(2)  # (N, C, HW)
    return softmax_scores(-channels, channels)  # max(S) is constant along d, so it cancels in the softmax


def _mix_channels(features: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    with without_autocast(features.device.type):
        mixed = (weights.to(features.dtype) @ features.flatten(2)).view_as(features)
    return scale.to(features.dtype) * mixed + features


def squeeze_excitation(features: Tensor, gate: Gate) -> Tensor:
    """Weight the channels of a map by one gate per image, computed from its global mean.

    Args:
        features: (N, C, H, W).
        gate: channel weights from pooled features, (N, 1, C) -> (N, 1, C).

    Returns:
        (N, C, H, W).
    """
    check_maps(features=features)
    pooled = features.mean((2, 3)).unsqueeze(1)  # (N, 1, C)
    return features * apply_gate(gate, pooled, "gate").squeeze(1)[:, :, None, None]


class PositionAttention(nn.Module):
    """DANet's position attention: 1x1 convolutions with biases, keys of C/8 channels, residual weight starts at 0.

    Args:
        channels: channels C of input and output.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        key_channels = max(channels // 8, 1)
        self.queries = nn.Conv2d(channels, key_channels, 1)
        self.keys = nn.Conv2d(channels, key_channels, 1)
        self.values = nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return position_attention(
            features, self.queries(features), self.keys(features), self.values(features), self.scale
        )

    def explain(self, features: Tensor) -> DualMaps:
        """Return the output with its attention weights, (HW)^2 numbers per image; for figures, not for training.

        Args:
            features: (N, C, H, W).
        """
        weights = softmax_scores(as_pixels(self.queries(features)), as_pixels(self.keys(features)))
        return DualMaps(self(features), weights)


class ChannelAttention(nn.Module):
    """DANet's channel attention. The only parameter is the residual weight, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return channel_attention(features, self.scale)

    def explain(self, features: Tensor) -> DualMaps:
        """Return the output with its attention weights; for figures, not for training.

        Args:
            features: (N, C, H, W).
        """
        weights = channel_weights(features)
        return DualMaps(_mix_channels(features, weights, self.scale), weights)


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation: two linear layers, ReLU, sigmoid; without biases, like CAA's gates.

    Args:
        channels: channels C of input and output.
        reduction: the hidden layer has C / reduction units.
    """

    def __init__(self, channels: int, *, reduction: int = 4) -> None:
        super().__init__()
        if reduction < 1:
            raise ValueError(f"reduction is {reduction}; expected 1 or more")
        self.gate = ChannelGate(channels, layers=1, width=max(channels // reduction, 1), activation="relu")

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return squeeze_excitation(features, self.gate)
