"""The fused implementation: line lengths, dtypes and gradients. Without a GPU, in Triton's interpreter."""

import copy
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from caaseg.attention import ChannelGate, ChannelizedAxialAttention, Implementation, channelized_axial_attention
from caaseg.attention.gate import Gate

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from caaseg.attention.fused import fused_gate
from caaseg.kernels import common
from caaseg.kernels.axial_forward import MAX_SINGLE_BLOCK
from caaseg.kernels.common import INTERPRETED, jit

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="no GPU, and triton was imported before TRITON_INTERPRET=1 was set",
)

DEVICE = "cpu" if INTERPRETED else "cuda"

# Largest error against float64, in multiples of the error of the factorised form. With the few draws that the slow
# interpreter allows, random variation gives 1.7. The interpreter also truncates bfloat16 where a GPU rounds.
LIMITS = {
    torch.float32: 2.0 if INTERPRETED else 1.5,
    torch.float16: 2.0 if INTERPRETED else 1.5,
    torch.bfloat16: 12.0 if INTERPRETED else 1.5,
}

IMPLEMENTATIONS: tuple[Implementation, Implementation] = ("fused", "factorised")
DRAWS = 3 if INTERPRETED else 16
SMALL_SIZES = [(1, 1), (2, 3), (5, 17), (33, 2), (2, 31)] if DEVICE == "cuda" else [(1, 1), (5, 17)]  # in 16 bits


def attend(maps: list[Tensor], gates: Sequence[Gate | None], implementation: Implementation) -> Tensor:
    column_keys, row_keys, values = maps
    column_gate, row_gate = gates
    return channelized_axial_attention(
        column_keys, row_keys, values, column_gate, row_gate, implementation=implementation
    )


def draw(
    size: tuple[int, int], dtype: torch.dtype, *, channels: int = 20, key_channels: int = 5, batch: int = 1
) -> tuple[list[Tensor], list[ChannelGate], Tensor]:
    """Return keys and values, gates without kinks (where rounding would change gradients), and a cotangent."""
    maps = [
        (torch.randn(batch, c, *size) * scale).to(DEVICE, dtype).requires_grad_()
        for c, scale in ((key_channels, 2 / key_channels**0.5), (key_channels, 2 / key_channels**0.5), (channels, 1.0))
    ]
    gates = [ChannelGate(channels, layers=3, width=12).to(DEVICE, dtype) for _ in range(2)]
    for gate in gates:
        gate.slope = 1.0
    return maps, gates, torch.randn(batch, channels, *size).to(DEVICE, dtype)


def results(
    maps: list[Tensor],
    gates: list[ChannelGate],
    cotangent: Tensor,
    implementation: Implementation,
    gated: tuple[bool, bool],
) -> list[Tensor]:
    """Return the output and the gradients of all maps and of the weights of the used gates."""
    used: list[Gate | None] = [gate if on else None for gate, on in zip(gates, gated, strict=True)]
    output = attend(maps, used, implementation)
    weights = [p for gate, on in zip(gates, gated, strict=True) if on for p in gate.parameters()]
    return [output.detach(), *torch.autograd.grad(output, [*maps, *weights], cotangent)]


def errors(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(ours, exact, strict=True)]


def to_float64(
    maps: list[Tensor], gates: list[ChannelGate], cotangent: Tensor
) -> tuple[list[Tensor], list[ChannelGate], Tensor]:
    maps64 = [m.detach().double().requires_grad_() for m in maps]
    return maps64, [copy.deepcopy(gate).double() for gate in gates], cotangent.double()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((5, 17), torch.float32),
        ((5, 17), torch.bfloat16),
        *(pytest.param(size, torch.float32, marks=pytest.mark.slow) for size in ((1, 1), (2, 3), (2, 31), (33, 2))),
        *(pytest.param(size, torch.float16, marks=pytest.mark.slow) for size in SMALL_SIZES),
        *(pytest.param(size, torch.bfloat16, marks=pytest.mark.slow) for size in SMALL_SIZES if size != (5, 17)),
    ],
    ids=str,
)
def test_output_and_gradients_are_as_accurate_as_the_factorised_form(size: tuple[int, int], dtype: torch.dtype) -> None:
    assert_as_accurate_as_the_factorised_form(size, dtype)


def assert_as_accurate_as_the_factorised_form(
    size: tuple[int, int], dtype: torch.dtype, *, draws: int = DRAWS, **channels: int
) -> None:
    # Errors over many elements: with few elements, the factorised form may be exact by chance.
    squares, batch = [], max(1, min(16, 64 // (size[0] * size[1])))
    for _ in range(draws):
        problem = draw(size, dtype, batch=batch, **channels)
        exact = results(*to_float64(*problem), "factorised", (True, True))
        both = [errors(results(*problem, form, (True, True)), exact) for form in IMPLEMENTATIONS]
        squares.append(torch.tensor(both) ** 2)
    ours, factorised = torch.stack(squares).mean(0).sqrt()
    least = 8 * torch.finfo(dtype).eps if size == (1, 1) else 0.0  # with one position, keys have zero gradient
    assert (ours <= (LIMITS[dtype] * factorised).clamp(min=least)).all(), ours / factorised


def test_lines_of_several_blocks_are_as_accurate_as_the_factorised_form() -> None:
    size = (1, MAX_SINGLE_BLOCK // 4 + 2)  # in float32 already; the slow tests have longer lines in 16 bits
    assert_as_accurate_as_the_factorised_form(size, torch.float32)


def test_gradients_of_a_line_of_one_block_and_a_tail_equal_those_of_the_factorised_form() -> None:
    # The backward kernels of lines above MAX_SINGLE_BLOCK read the statistics that the kernel for tails stores.
    problem = draw((1, MAX_SINGLE_BLOCK + 2), torch.float16, channels=4, key_channels=3)
    exact = results(*to_float64(*problem), "factorised", (True, True))
    assert max(errors(results(*problem, "fused", (True, True)), exact)) < 0.01


LONG = [(145, 2), (2, 160), (2, 192), (2, 256), (2, 272), (2, 300), (2, 512)]


@pytest.mark.slow
@pytest.mark.parametrize("size", LONG if DEVICE == "cuda" else [(1, 145)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16], ids=str)
def test_long_lines_in_16_bits_are_as_accurate_as_the_factorised_form(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    draws = 1 if INTERPRETED else DRAWS  # enough with so many elements
    # Two blocks of channels.
    assert_as_accurate_as_the_factorised_form(size, dtype, draws=draws, channels=272, key_channels=20)


@pytest.mark.parametrize("size", [(2, 5), (1, MAX_SINGLE_BLOCK // 4 + 2)], ids=str)
def test_large_scores_do_not_overflow(size: tuple[int, int]) -> None:
    maps, gates, _ = draw(size, torch.float32)
    maps = [maps[0].detach() * 20, maps[1].detach() * 20, maps[2].detach()]  # exp(score) is infinite
    torch.testing.assert_close(attend(maps, gates, "fused"), attend(maps, gates, "factorised"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"),
    [*product([(9, 33), (18, 65), (130, 2)], LIMITS), *product([(257, 2)], [torch.float32, torch.bfloat16])]
    if DEVICE == "cuda"
    else [((9, 33), torch.float32), ((97, 1), torch.float32)],
    ids=str,
)
def test_larger_maps_are_as_accurate_as_the_factorised_form(size: tuple[int, int], dtype: torch.dtype) -> None:
    assert_as_accurate_as_the_factorised_form(size, dtype)


@pytest.mark.parametrize("gated", [(False, False), (True, False), (False, True)], ids=str)
def test_each_gate_is_optional(gated: tuple[bool, bool]) -> None:
    problem = draw((4, 6), torch.float32, batch=2)
    exact = results(*to_float64(*problem), "factorised", gated)
    assert max(errors(results(*problem, "fused", gated), exact)) < 2e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_all_memory_layouts_are_accepted_and_the_output_is_channels_last(layout: str) -> None:
    maps, gates, _ = draw((3, 5), torch.float32)
    with torch.no_grad():
        expected = attend(maps, gates, "factorised")
        if layout == "channels_last":
            maps = [m.contiguous(memory_format=torch.channels_last) for m in maps]
        if layout == "transposed":
            maps = [m.transpose(2, 3).contiguous().transpose(2, 3) for m in maps]
        output = attend(maps, gates, "fused")
    torch.testing.assert_close(output, expected)
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_custom_gates_are_supported() -> None:
    maps, _, cotangent = draw((3, 4), torch.float32)
    matrix = torch.randn(20, 20, device=DEVICE, requires_grad=True)

    def gate(pooled: Tensor) -> Tensor:
        return (pooled @ matrix).sigmoid()

    found = []
    for implementation in IMPLEMENTATIONS:
        output = attend(maps, [gate, gate], implementation)
        found.append([output.detach(), *torch.autograd.grad(output, [*maps, matrix], cotangent)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_fused_channel_gate_equals_the_module_and_calls_its_hooks() -> None:
    gate = ChannelGate(20, layers=5, width=24, activation="relu").to(DEVICE)
    pooled = torch.randn(2, 7, 20, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(fused_gate(gate, pooled, "gate"), gate(pooled))
    outputs: list[Tensor] = []
    gate.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    fused_gate(gate, pooled, "gate")
    assert len(outputs) == 1


def test_a_gate_of_many_positions_equals_the_module() -> None:
    gate = ChannelGate(20, layers=1, width=8).to(DEVICE)  # each program computes several blocks of channels
    pooled = torch.randn(1, 1100, 20, device=DEVICE, requires_grad=True)
    found, expected = fused_gate(gate, pooled, "gate"), gate(pooled)
    torch.testing.assert_close(found, expected)
    inputs = [pooled, *gate.parameters()]
    cotangent = torch.randn_like(found)
    gradients = [torch.autograd.grad(output, inputs, cotangent) for output in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_channel_gate_with_changed_layers_is_called_as_a_module() -> None:
    pooled = torch.randn(2, 7, 20, device=DEVICE)
    gate = ChannelGate(20, width=24).to(DEVICE)
    gate.hidden[0].register_forward_hook(lambda module, inputs, output: output + 1)
    with torch.no_grad():
        torch.testing.assert_close(fused_gate(gate, pooled, "gate"), gate(pooled))
    gate = ChannelGate(20, width=24).to(DEVICE)
    gate.hidden[1] = torch.nn.Sequential(gate.hidden[1], torch.nn.Tanh())
    with torch.no_grad():
        torch.testing.assert_close(fused_gate(gate, pooled, "gate"), gate(pooled))


def test_second_derivatives_raise_an_error() -> None:
    maps, gates, cotangent = draw((3, 4), torch.float32)
    output = attend(maps, gates, "fused")
    with pytest.raises(RuntimeError, match="cannot be differentiated again; use implementation='factorised'"):
        torch.autograd.grad(output, maps, cotangent, create_graph=True)


def test_a_gate_too_wide_for_the_kernel_is_called_as_a_module() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for width, dtype, weight_dtype in ((129, fp32, fp32), (257, bf16, bf16), (129, bf16, fp32)):
        gate = ChannelGate(20, width=width).to(DEVICE, weight_dtype)
        outputs: list[Tensor] = []
        gate.register_forward_hook(lambda module, inputs, output, outputs=outputs: outputs.append(output))
        pooled = torch.randn(2, 7, 20, device=DEVICE, dtype=dtype)
        with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=dtype != weight_dtype):
            found = fused_gate(gate, pooled, "gate")
        torch.testing.assert_close(found, outputs[0].to(found.dtype))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((6, 33), torch.float32),
        pytest.param((44, 60), torch.bfloat16, marks=pytest.mark.slow),
        *(pytest.param((6, n), torch.bfloat16, marks=pytest.mark.slow) for n in (145, 272) if DEVICE == "cuda"),
    ],
    ids=str,
)
def test_results_are_bitwise_deterministic(size: tuple[int, int], dtype: torch.dtype) -> None:
    on_gpu = DEVICE == "cuda"  # programs run concurrently there: repeat often
    shape = {"channels": 256, "key_channels": 64, "batch": 8} if on_gpu else {}
    problem = draw(size if on_gpu else (3, size[1]), dtype, **shape)
    first = results(*problem, "fused", (True, True))
    for _ in range(50 if on_gpu else 1):
        again = results(*problem, "fused", (True, True))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="checks the arithmetic in the interpreter")
def test_the_exponential_in_float32_is_accurate_to_two_ulps() -> None:
    exponents = -torch.rand(4096) * 80
    found = torch.empty_like(exponents)
    _exp_kernel[(1,)](exponents, found, size=4096)
    exact = exponents.double().exp()
    assert ((found.double() - exact).abs() / exact).max() < 2 * torch.finfo(torch.float32).eps
    _exp_kernel[(1,)](torch.full_like(exponents, -torch.inf), found, size=4096)
    assert not found.any()


@jit
def _exp_kernel(inputs: tl.tensor, outputs: tl.tensor, size: tl.constexpr) -> None:
    offs = tl.arange(0, size)
    tl.store(outputs + offs, common.exp(tl.load(inputs + offs), True))


def test_the_block_gives_the_same_output_with_the_fused_implementation() -> None:
    features = torch.randn(1, 6, 4, 5, device=DEVICE)
    for channelize in (True, False):
        torch.manual_seed(0)
        block = ChannelizedAxialAttention(6, key_channels=4, value_channels=8, channelize=channelize).to(DEVICE).eval()
        with torch.no_grad():
            expected = block(features)
            block.implementation = "fused"
            torch.testing.assert_close(block(features), expected)


def test_fused_raises_an_error_with_the_reason_if_it_does_not_apply() -> None:
    maps, gates, _ = draw((2, 3), torch.float32)

    with pytest.raises(ValueError, match=r"implementation is 'fused', but values are torch\.float64; expected float16"):
        attend([m.double() for m in maps], gates, "fused")
    with pytest.raises(ValueError, match=r"keys are torch\.float16 and torch\.float32; expected the dtype of values"):
        attend([maps[0].half(), *maps[1:]], gates, "fused")
    with pytest.raises(ValueError, match=r"keys have 300 channels; expected at most 256"):
        attend([torch.randn(1, 300, 2, 3, device=DEVICE), *maps[1:]], gates, "fused")


def test_torch_compile_traces_the_kernels_as_operators() -> None:
    maps, gates, cotangent = draw((4, 5), torch.float32)

    def plain(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return attend([a, b, v], gates, "fused")

    expected = torch.autograd.grad(plain(*maps), maps, cotangent)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*maps), maps, cotangent)
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-6
    )  # with gradients, gates are compiled layer by layer
