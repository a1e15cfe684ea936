"""Attention in half precision is as accurate as the format allows, because scores are computed in float32."""

import copy

import pytest
import torch
from torch import Tensor

from caaseg.attention import (
    ChannelGate,
    ChannelizedAxialAttention,
    Implementation,
    axial_attention,
    channel_attention,
    channelized_axial_attention,
    channelized_self_attention,
    position_attention,
    self_attention,
)

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
LAYOUTS = ["contiguous", "channels_last", "transposed", "strided"]
IMPLEMENTATIONS: list[Implementation] = ["factorised", "grouped", "loop"]


def draw(seed: int, channels: int, dtype: torch.dtype, layout: str, scale: float = 1.0) -> Tensor:
    n, h, w = 2, 21, 17
    rng = torch.Generator().manual_seed(seed)
    if layout == "transposed":
        return (scale * torch.randn(n, channels, w, h, generator=rng)).to(dtype).transpose(2, 3)
    if layout == "strided":
        return (scale * torch.randn(n, 2 * channels, h, 2 * w, generator=rng)).to(dtype)[:, ::2, :, 1::2]
    drawn = (scale * torch.randn(n, channels, h, w, generator=rng)).to(dtype)
    return drawn.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else drawn


def attend(name: str, maps: list[Tensor], gates: list[ChannelGate]) -> Tensor:
    a, b, v = maps
    if name == "axial":
        return axial_attention(a, b, v)
    if name == "self":
        return self_attention(a, b, v)
    if name == "channelized_self":
        return channelized_self_attention(a, b, v, gates[0])
    if name == "position":
        return position_attention(v, a, b, v, v.new_tensor(0.5))
    if name == "channel":
        return channel_attention(v, v.new_tensor(0.5))
    return channelized_axial_attention(a, b, v, gates[0], gates[1], implementation=name, groups=4)  # type: ignore[arg-type]


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.detach().double() - expected.detach()).norm() / expected.detach().norm())


NAMES = [*IMPLEMENTATIONS, "axial", "self", "channelized_self", "position", "channel"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_error_against_float64_is_within_the_precision_of_the_dtype(name: str, dtype: torch.dtype, layout: str) -> None:
    maps = [draw(seed, channels, dtype, layout) for seed, channels in enumerate((16, 16, 32))]
    torch.manual_seed(5)
    gates = [ChannelGate(32).to(dtype) for _ in range(2)]
    ours = attend(name, maps, gates)
    assert ours.dtype == dtype
    expected = attend(name, [m.double() for m in maps], [gate.double() for gate in gates])
    assert relative_error(ours, expected) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, *LIMITS], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_of_large_keys_are_finite(name: str, dtype: torch.dtype) -> None:
    maps = [draw(0, 64, dtype, "contiguous", 100), draw(1, 64, dtype, "contiguous", 100)]
    maps.append(draw(2, 32, dtype, "contiguous", 100 if name == "channel" else 1))
    maps = [m.requires_grad_() for m in maps]
    gates = [ChannelGate(32).to(dtype) for _ in range(2)]
    output = attend(name, maps, gates)
    used = maps[2:] if name == "channel" else maps
    gradients = torch.autograd.grad(output, used, torch.randn_like(output))
    for tensor in (output, *gradients):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_neither_dtype_nor_accuracy(name: str, dtype: torch.dtype) -> None:
    maps = [draw(seed, channels, dtype, "contiguous") for seed, channels in enumerate((64, 64, 32))]
    gates = [ChannelGate(32) for _ in range(2)]
    expected = attend(name, [m.double() for m in maps], [copy.deepcopy(gate).double() for gate in gates])
    with torch.autocast("cpu", torch.bfloat16):
        ours = attend(name, maps, gates)
    assert ours.dtype == dtype
    # Gates run in bfloat16 here; scores in bfloat16 would have ten times that error.
    assert relative_error(ours, expected) < (LIMITS[torch.bfloat16] if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "channelized_self"])
def test_large_values_do_not_overflow_the_pooling_in_half_precision(name: str) -> None:
    maps = [draw(0, 16, torch.float16, "contiguous"), draw(1, 16, torch.float16, "contiguous")]
    maps.append(draw(2, 32, torch.float16, "contiguous").abs() * 5000)
    assert attend(name, maps, [ChannelGate(32).half() for _ in range(2)]).isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gate_of_another_dtype_does_not_change_the_dtype_of_the_output(implementation: Implementation) -> None:
    query, key, value = (draw(seed, size, torch.bfloat16, "contiguous") for seed, size in enumerate((16, 16, 32)))

    def gate(pooled: Tensor) -> Tensor:
        return pooled.double().sigmoid()

    output = channelized_axial_attention(query, key, value, gate, gate, implementation=implementation, groups=4)
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_block_stays_in_half_precision_under_autocast(implementation: Implementation) -> None:
    block = ChannelizedAxialAttention(16, key_channels=8, value_channels=32, implementation=implementation, groups=3)
    features = draw(0, 16, torch.float32, "channels_last")
    with torch.autocast("cpu", torch.bfloat16):
        output = block(features)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in block.parameters())
