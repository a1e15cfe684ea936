"""Attention blocks under torch.compile and torch.export."""

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from caaseg.attention import ChannelizedAxialAttention, PositionAttention, SelfAttention

SIZES = [(2, 9, 11), (1, 5, 3), (3, 12, 4), (2, 2, 30)]


def block(**options: Any) -> ChannelizedAxialAttention:
    torch.manual_seed(0)
    return ChannelizedAxialAttention(8, key_channels=4, value_channels=6, gate_width=4, **options)


def assert_compiled_agrees(module: nn.Module, backend: str, sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
    """Compare outputs and parameter gradients at several sizes, all through one dynamic graph."""
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for n, h, w in sizes:
        features = torch.randn(n, 8, h, w)
        expected = torch.autograd.grad(module(features).square().sum(), list(module.parameters()))
        ours = torch.autograd.grad(compiled(features).square().sum(), list(module.parameters()))
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
        with torch.no_grad():
            torch.testing.assert_close(compiled(features), module(features), atol=1e-5, rtol=1e-4)


def test_the_block_compiles_as_one_graph() -> None:
    assert_compiled_agrees(block().eval(), "eager")


@pytest.mark.slow
def test_self_attention_compiles_as_one_graph() -> None:
    module = SelfAttention(8, key_channels=4, value_channels=6, channelize=True, gate_width=4)
    assert_compiled_agrees(module.eval(), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_grouped_and_loop_compile_as_one_graph_at_a_fixed_size(implementation: str) -> None:
    module = block(implementation=implementation, groups=3).eval()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend="aot_eager")
    features = torch.randn(2, 8, 5, 7)
    torch.testing.assert_close(compiled(features), module(features))


@pytest.mark.slow
def test_the_block_compiles_with_the_default_backend() -> None:
    assert_compiled_agrees(block(gate_layers=1).eval(), "inductor", SIZES[:2])


@pytest.mark.parametrize(
    ("channelize", "strict"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_the_block_exports_with_dynamic_batch_height_and_width(channelize: bool, strict: bool) -> None:
    module = block(channelize=channelize).eval()
    dynamic = {0: Dim("n", min=1, max=64), 2: Dim("h", min=1, max=512), 3: Dim("w", min=1, max=512)}
    exported = torch.export.export(
        module, (torch.randn(2, 8, 9, 11),), dynamic_shapes=(dynamic,), strict=strict
    ).module()
    for n, h, w in [*SIZES, (1, 1, 1), (1, 1, 20), (4, 33, 1)]:
        features = torch.randn(n, 8, h, w)
        torch.testing.assert_close(exported(features), module(features))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize(
    ("module", "size"),
    [
        pytest.param(block(gate_layers=1), (3, 4), id="caa-3x4"),
        pytest.param(block(channelize=False), (8, 8), id="axial-8x8"),
        pytest.param(SelfAttention(8, key_channels=4, value_channels=8), (3, 4), id="self_attention-3x4"),
        pytest.param(PositionAttention(8), (3, 4), id="position-3x4"),
    ],
)
def test_a_batch_of_one_image_compiles_to_the_same_numbers_and_gradients(
    module: nn.Module, size: tuple[int, int]
) -> None:
    module = module.double().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    features = torch.randn(1, 8, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    features.requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    for grad_mode in (torch.no_grad, torch.enable_grad):  # torch.compile applies other rewrites in inference
        with grad_mode():
            torch.testing.assert_close(compiled(features), module(features))
    cotangent = torch.randn_like(module(features))
    found, expected = (torch.autograd.grad(forward(features), features, cotangent) for forward in (compiled, module))
    torch.testing.assert_close(found, expected)
