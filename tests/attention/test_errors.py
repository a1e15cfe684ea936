"""Errors name the argument, the value found and the value expected."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from caaseg.attention import (
    ChannelGate,
    ChannelizedAxialAttention,
    axial_attention,
    channel_attention,
    channelized_axial_attention,
    channelized_self_attention,
    position_attention,
    self_attention,
    squeeze_excitation,
)


def maps(**changed: Tensor) -> dict[str, Any]:
    shapes = {"column_keys": (2, 3, 5, 7), "row_keys": (2, 3, 5, 7), "values": (2, 4, 5, 7)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | changed


INVALID_MAPS: list[tuple[dict[str, Tensor], str]] = [
    (
        {"values": torch.randn(4, 5, 7)},
        "values has 3 dimensions, shape (4, 5, 7); expected 4: (N, channels, H, W); "
        "add a batch dimension with unsqueeze(0) if there is one image",
    ),
    (
        {"row_keys": torch.randn(2, 3, 5)},
        "row_keys has 3 dimensions, shape (2, 3, 5); expected 4: (N, channels, H, W)",
    ),
    (
        {"column_keys": torch.randn(2, 3, 6, 7)},
        "column_keys has shape (2, 3, 6, 7), but values has shape (2, 4, 5, 7); "
        "batch, height and width (axes 0, 2 and 3) must agree",
    ),
    (
        {"row_keys": torch.randn(1, 3, 5, 7)},
        "row_keys has shape (1, 3, 5, 7), but values has shape (2, 4, 5, 7); batch, height and width",
    ),
    (
        {"column_keys": torch.randn(2, 3, 5, 7, device="meta")},
        "column_keys is on meta, but values is on cpu; move both to one device",
    ),
    (
        {"values": torch.randn(2, 4, 0, 7)},
        "values has an empty axis H, shape (2, 4, 0, 7); every axis needs at least 1 entry",
    ),
    (
        {"values": torch.randint(9, (2, 4, 5, 7))},
        "values has dtype torch.int64; expected a floating-point dtype; convert it with .float()",
    ),
]


@pytest.mark.parametrize(("changed", "message"), INVALID_MAPS)
def test_errors_of_axial_attention_name_the_invalid_map(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        axial_attention(**maps(**changed))
    with pytest.raises(ValueError, match=re.escape(message)):
        channelized_axial_attention(**maps(**changed), column_gate=None, row_gate=None)


@pytest.mark.parametrize("axis", ["N", "channels", "H", "W"])
def test_errors_name_the_empty_axis(axis: str) -> None:
    shape = [2, 3, 5, 7]
    shape[["N", "channels", "H", "W"].index(axis)] = 0
    empty = torch.randn(shape)
    with pytest.raises(ValueError, match=f"features has an empty axis {axis}, shape"):
        channel_attention(empty, torch.ones(()))
    with pytest.raises(ValueError, match=f"features has an empty axis {axis}, shape"):
        squeeze_excitation(empty, torch.sigmoid)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups is 0; expected an integer: 1 (full vectorization) or more (smaller slices)"),
        ({"groups": -3}, "groups is -3; expected an integer: 1 (full vectorization) or more (smaller slices)"),
        ({"groups": 2.5}, "groups is 2.5; expected an integer: 1 (full vectorization) or more (smaller slices)"),
        (
            {"implementation": "fast"},
            "implementation is 'fast'; expected one of auto, factorised, grouped, loop, fused",
        ),
    ],
)
def test_function_and_block_raise_the_same_errors_for_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        channelized_axial_attention(**maps(), column_gate=None, row_gate=None, **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        ChannelizedAxialAttention(8, **options)


@pytest.mark.parametrize("implementation", ["factorised", "grouped", "loop"])
@pytest.mark.parametrize("axis", ["column_gate", "row_gate"])
def test_errors_name_the_gate_that_returns_another_shape(axis: str, implementation: Any) -> None:
    gates: dict[str, Any] = {"column_gate": torch.sigmoid, "row_gate": torch.sigmoid} | {
        axis: lambda pooled: pooled[..., :1]
    }
    with pytest.raises(
        ValueError, match=rf"{axis} returned shape \(2, \d, 1\) for pooled features of shape \(2, \d, 4"
    ):
        channelized_axial_attention(**maps(), **gates, implementation=implementation)


def test_errors_of_self_attention_name_the_invalid_argument() -> None:
    queries, keys, values = torch.randn(2, 3, 5, 7), torch.randn(2, 6, 5, 7), torch.randn(2, 4, 5, 7)
    message = "keys has 6 channels, but queries has 3; expected the same number"
    with pytest.raises(ValueError, match=message):
        self_attention(queries, keys, values)
    with pytest.raises(ValueError, match=message):
        position_attention(values, queries, keys, values, torch.ones(()))
    with pytest.raises(ValueError, match="gate returned shape"):
        channelized_self_attention(queries, queries, values, lambda pooled: pooled.mean(1))
    with pytest.raises(ValueError, match="queries has 3 dimensions"):
        self_attention(queries[0], queries, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels is 0; a gate needs at least 1"),
        ({"channels": 8, "layers": 0}, "layers is 0; a gate needs at least 1"),
        ({"channels": 8, "width": -1}, "width is -1; a gate needs at least 1"),
        ({"channels": 8, "activation": "gelu"}, "activation is 'gelu'; expected one of leaky_relu, relu"),
    ],
)
def test_a_channel_gate_raises_errors_for_invalid_sizes_and_activations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelGate(**options)
