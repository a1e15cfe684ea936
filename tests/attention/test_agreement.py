"""All implementations equal the definition, for any size and any number of groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caaseg.attention import (
    ChannelGate,
    Gate,
    Implementation,
    SqueezeExcitation,
    axial_attention,
    channel_attention,
    channelized_axial_attention,
    channelized_self_attention,
    position_attention,
    self_attention,
    squeeze_excitation,
)
from caaseg.attention.spatial import attend, attend_split
from tests.attention.definition import axial_by_definition, spatial_by_definition

IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "factorised", "grouped", "loop")

counts = st.integers(1, 4)
lengths = st.integers(1, 7)
seeds = st.integers(0, 2**31)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_gate(seed: int, channels: int) -> ChannelGate:
    gate = ChannelGate(channels, layers=2, width=3).double()
    for index, weight in enumerate(gate.parameters()):
        weight.data = 3 * draw(seed + index, *weight.shape)  # gates far from one half
    return gate


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).detach().norm() / expected.detach().norm().clamp_min(1e-30))


@given(
    n=counts, c=counts, d=counts, h=lengths, w=lengths, groups=st.integers(1, 9), seed=seeds, gated=st.integers(0, 3)
)
def test_every_implementation_equals_the_definition(
    n: int, c: int, d: int, h: int, w: int, groups: int, seed: int, gated: int
) -> None:
    column_keys, row_keys, values = draw(seed, n, d, h, w), draw(seed + 1, n, d, h, w), draw(seed + 2, n, c, h, w)
    column_gate: Gate | None = draw_gate(seed + 3, c) if gated & 1 else None
    row_gate: Gate | None = draw_gate(seed + 9, c) if gated & 2 else None
    expected = axial_by_definition(column_keys, row_keys, values, column_gate, row_gate)
    for implementation in IMPLEMENTATIONS:
        ours = channelized_axial_attention(
            column_keys, row_keys, values, column_gate, row_gate, implementation=implementation, groups=groups
        )
        assert ours.shape == (n, c, h, w)
        assert relative_error(ours, expected) < 1e-10, implementation


@pytest.mark.parametrize(("h", "w"), [(5, 7), (7, 5), (1, 6), (6, 1), (1, 1)])
def test_output_and_gradients_equal_the_definition_for_every_number_of_groups(h: int, w: int) -> None:
    maps = [draw(seed, 2, 3, h, w).requires_grad_() for seed in range(3)]
    column_gate, row_gate = draw_gate(3, 3), draw_gate(9, 3)
    weights = [*maps, *column_gate.parameters(), *row_gate.parameters()]
    cotangent = draw(20, 2, 3, h, w)
    expected = axial_by_definition(maps[0], maps[1], maps[2], column_gate, row_gate)
    expected_gradients = torch.autograd.grad(expected, weights, cotangent)
    for implementation, groups in [("factorised", 1), ("loop", 1), *(("grouped", g) for g in range(1, max(h, w) + 4))]:
        ours = channelized_axial_attention(
            maps[0],
            maps[1],
            maps[2],
            column_gate,
            row_gate,
            implementation=implementation,  # type: ignore[arg-type]
            groups=groups,
        )
        assert relative_error(ours, expected) < 1e-10, (implementation, groups)
        for mine, theirs in zip(torch.autograd.grad(ours, weights, cotangent), expected_gradients, strict=True):
            # With one position, the softmax is constant and key gradients are 0 up to rounding.
            assert (mine - theirs).norm() < 1e-10 * max(float(theirs.norm()), 1e-3), (implementation, groups)


@pytest.mark.parametrize("implementation", ["factorised", "grouped", "loop"])
@pytest.mark.parametrize("gated", ["both", "column", "row", "none"])
def test_gradients_pass_gradcheck(implementation: Implementation, gated: str) -> None:
    maps = [draw(seed, 1, 2, 2, 3).requires_grad_() for seed in range(3)]
    column_gate = draw_gate(3, 2) if gated in ("both", "column") else None
    row_gate = draw_gate(9, 2) if gated in ("both", "row") else None

    def attend(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return channelized_axial_attention(a, b, v, column_gate, row_gate, implementation=implementation, groups=2)

    assert torch.autograd.gradcheck(attend, maps)
    assert torch.autograd.gradgradcheck(attend, maps, fast_mode=True)


@given(n=counts, c=counts, d=counts, h=lengths, w=lengths, seed=seeds)
def test_axial_attention_equals_its_definition(n: int, c: int, d: int, h: int, w: int, seed: int) -> None:
    column_keys, row_keys, values = draw(seed, n, d, h, w), draw(seed + 1, n, d, h, w), draw(seed + 2, n, c, h, w)
    expected = axial_by_definition(column_keys, row_keys, values, None, None)
    assert relative_error(axial_attention(column_keys, row_keys, values), expected) < 1e-10


@given(n=counts, c=counts, d=counts, h=lengths, w=lengths, seed=seeds)
def test_self_attention_plain_and_channelized_equals_its_definition(
    n: int, c: int, d: int, h: int, w: int, seed: int
) -> None:
    queries, keys, values = draw(seed, n, d, h, w), draw(seed + 1, n, d, h, w), draw(seed + 2, n, c, h, w)
    gate = draw_gate(seed + 3, c)
    plain, gated = self_attention(queries, keys, values), channelized_self_attention(queries, keys, values, gate)
    assert relative_error(plain, spatial_by_definition(queries, keys, values, None)) < 1e-10
    assert relative_error(gated, spatial_by_definition(queries, keys, values, gate)) < 1e-10


@given(n=counts, heads=counts, d=counts, h=lengths, w=lengths, seed=seeds)
def test_attention_in_slices_of_value_channels_gives_the_same(
    n: int, heads: int, d: int, h: int, w: int, seed: int
) -> None:
    queries, keys, values = draw(seed, n, h * w, d), draw(seed + 1, n, h * w, d), draw(seed + 2, n, h * w, heads * d)
    assert relative_error(attend_split(queries, keys, values), attend(queries, keys, values)) < 1e-10


def test_the_baselines_pass_gradcheck() -> None:
    features, queries, keys, values = (draw(seed, 2, 2, 3, 2).requires_grad_() for seed in range(4))
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    gate = draw_gate(3, 2)
    assert torch.autograd.gradcheck(axial_attention, (queries, keys, values))
    assert torch.autograd.gradcheck(self_attention, (queries, keys, values))
    assert torch.autograd.gradcheck(lambda q, k, v: channelized_self_attention(q, k, v, gate), (queries, keys, values))
    assert torch.autograd.gradcheck(position_attention, (features, queries, keys, values, scale))
    assert torch.autograd.gradcheck(channel_attention, (features, scale))
    assert torch.autograd.gradcheck(lambda x: squeeze_excitation(x, gate), (features,))


@given(n=counts, c=counts, h=lengths, w=lengths, seed=seeds)
def test_channel_attention_and_squeeze_excitation_equal_their_definitions(
    n: int, c: int, h: int, w: int, seed: int
) -> None:
    features, scale = draw(seed, n, c, h, w), torch.tensor(0.7, dtype=torch.float64)
    products = torch.einsum("ncij,ndij->ncd", features, features)
    weights = (products.amax(-1, keepdim=True) - products).softmax(-1)  # as in DANet's code
    expected = scale * torch.einsum("ncd,ndij->ncij", weights, features) + features
    assert relative_error(channel_attention(features, scale), expected) < 1e-10

    gate = draw_gate(seed, c)
    expected = features * gate(features.mean((2, 3)))[:, :, None, None]
    assert relative_error(squeeze_excitation(features, gate), expected) < 1e-10


def test_squeeze_excitation_has_a_hidden_layer_of_a_quarter_of_the_channels() -> None:
    assert [tuple(weight.shape) for weight in SqueezeExcitation(16).parameters()] == [(4, 16), (16, 4)]
    assert [tuple(weight.shape) for weight in SqueezeExcitation(2).parameters()] == [(1, 2), (2, 1)]
