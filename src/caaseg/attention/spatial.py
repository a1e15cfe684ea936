"""Self-attention over all pixels, Eqs. (1) and (2), plain and channelized.

Shapes: N batch, C value channels, D key channels, H rows, W columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from caaseg.attention.axial import softmax_scores, without_autocast
from caaseg.attention.checks import check_maps, check_same_channels
from caaseg.attention.gate import Activation, ChannelGate, Gate, apply_gate
from caaseg.attention.projection import projection


class SpatialMaps(NamedTuple):
    """Output, attention weights and gate of a self-attention block. Large: (HW)^2 numbers per image."""

    output: Tensor  # (N, C, H, W)
    weights: Tensor  # (N, HW, HW), attention between all pixels
    gate: Tensor | None  # (N, HW, C), one vector per pixel; None without a gate


def as_pixels(features: Tensor) -> Tensor:
    """Reshape a map to a list of pixels, (N, C, H, W) -> (N, HW, C)."""
    return features.flatten(2).transpose(1, 2)


def from_pixels(pixels: Tensor, height: int, width: int) -> Tensor:
    """Reshape a list of pixels to a map, (N, HW, C) -> (N, C, H, W), channels last in memory."""
    return pixels.view(pixels.shape[0], height, width, pixels.shape[2]).permute(0, 3, 1, 2)


def self_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from every pixel to every pixel, Eq. (1), with the unscaled similarity of Eq. (2).

    Args:
        queries: (N, D, H, W).
        keys: (N, D, H, W); in the paper the same as the queries.
        values: features to gather, (N, C, H, W).

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    return _gather_pixels(queries, keys, values, None)


def channelized_self_attention(queries: Tensor, keys: Tensor, values: Tensor, gate: Gate) -> Tensor:
    """Weight the terms of self-attention by one channel gate per pixel before they are summed (Table 3).

    The gate of a pixel is constant over the HW terms of that pixel, so it factors out of the sum: the pooled features
    are the plain result divided by HW, and no tensor of HW x HW x C is built.

    Args:
        queries: (N, D, H, W).
        keys: (N, D, H, W).
        values: features to gather, (N, C, H, W).
        gate: channel weights from pooled features, (N, HW, C) -> (N, HW, C), pixels independent.

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    return _gather_pixels(queries, keys, values, gate)


def _gather_pixels(queries: Tensor, keys: Tensor, values: Tensor, gate: Gate | None) -> Tensor:
    check_maps(values=values, queries=queries, keys=keys)
    check_same_channels(queries=queries, keys=keys)
    with without_autocast(values.device.type):
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        q, k, v = as_pixels(queries), as_pixels(keys), as_pixels(values)  # (N, HW, D), (N, HW, D), (N, HW, C)
        # Fast GPU kernels require half precision, and as many value as key channels.
        split = values.is_cuda and values.dtype in (torch.float16, torch.bfloat16) and v.shape[2] % q.shape[2] == 0
        gathered = attend_split(q, k, v) if split else attend(q, k, v)  # (N, HW, C)
    return from_pixels(_gated(gathered, gate)[0], *values.shape[2:])


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = 1.0) -> Tensor:
    """Compute attention, (N, Q, D), (N, K, D) and (N, K, C) -> (N, Q, C), without storing the weights.

    Args:
        queries: (N, Q, D).
        keys: (N, K, D).
        values: (N, K, C).
        scale: factor of the dot products; None for 1 / sqrt(D).
    """
    return scaled_dot_product_attention(
        queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), scale=scale
    ).squeeze(1)


def attend_split(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute `attend` for D value channels at a time, each slice as a head with the same queries and keys."""
    channels = queries.shape[2]
    heads = values.shape[2] // channels
    q, k = (x.unsqueeze(1).expand(-1, heads, -1, -1) for x in (queries, keys))  # (N, C/D, HW, D)
    v = values.view(*values.shape[:2], heads, channels).transpose(1, 2)  # (N, C/D, HW, D)
    return scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)


def _gated(gathered: Tensor, gate: Gate | None) -> tuple[Tensor, Tensor | None]:
    if gate is None:
        return gathered, None
    weights = apply_gate(gate, gathered / gathered.shape[1], "gate")  # (N, HW, C)
    return gathered * weights, weights


class SelfAttention(nn.Module):
    """Self-attention with one projection for queries and keys, Eq. (2), optionally channelized.

    Args:
        in_channels: channels of the input map.
        key_channels: channels D of queries and keys.
        value_channels: channels C of values and output.
        channelize: add the channel gate.
        gate_layers: hidden layers of the gate.
        gate_width: units per hidden layer.
        gate_activation: "leaky_relu" (slope 0.2) or "relu".
    """

    def __init__(
        self,
        in_channels: int,
        *,
        key_channels: int = 64,
        value_channels: int = 512,
        channelize: bool = False,
        gate_layers: int = 5,
        gate_width: int = 128,
        gate_activation: Activation = "leaky_relu",
    ) -> None:
        super().__init__()
        self.keys = projection(in_channels, key_channels)
        self.values = projection(in_channels, value_channels)
        self.gate = (
            ChannelGate(value_channels, layers=gate_layers, width=gate_width, activation=gate_activation)
            if channelize
            else None
        )

    def forward(self, features: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, value_channels, H, W)."""
        keys = self.keys(features)
        return _gather_pixels(keys, keys, self.values(features), self.gate)

    def explain(self, features: Tensor) -> SpatialMaps:
        """Return the output with its attention weights and gate; for figures, not for training.

        Args:
            features: (N, in_channels, H, W).
        """
        keys, values = as_pixels(self.keys(features)), as_pixels(self.values(features))
        weights = softmax_scores(keys, keys)
        output, gate = _gated(weights.to(values.dtype) @ values, self.gate)
        return SpatialMaps(from_pixels(output, *features.shape[2:]), weights, gate)
