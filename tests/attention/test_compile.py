"""The block under torch.compile and torch.export, sizes left open."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from caaseg.attention import ChannelizedAxialAttention, SelfAttention

SIZES = [(2, 9, 11), (1, 5, 3), (3, 12, 4), (2, 2, 30)]


def block(**options: Any) -> ChannelizedAxialAttention:
    torch.manual_seed(0)
    return ChannelizedAxialAttention(8, key_channels=4, value_channels=6, gate_width=4, **options)


def assert_compiled_agrees(module: nn.Module, backend: str, sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
    """Forward, and the gradient of every weight, at several sizes through one dynamic graph."""
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


@pytest.mark.parametrize("channelize", [True, False])
def test_the_block_compiles_as_one_graph(channelize: bool) -> None:
    assert_compiled_agrees(block(channelize=channelize).eval(), "aot_eager")


def test_self_attention_compiles_as_one_graph() -> None:
    module = SelfAttention(8, key_channels=4, value_channels=6, channelize=True, gate_width=4)
    assert_compiled_agrees(module.eval(), "aot_eager")


@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_the_paper_s_forms_compile_as_one_graph_at_a_fixed_size(implementation: str) -> None:
    module = block(implementation=implementation, groups=3).eval()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend="aot_eager")
    features = torch.randn(2, 8, 5, 7)
    torch.testing.assert_close(compiled(features), module(features))


@pytest.mark.slow
def test_the_block_compiles_with_the_default_backend() -> None:
    assert_compiled_agrees(block().eval(), "inductor", SIZES[:2])


@pytest.mark.parametrize("channelize", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_the_block_exports_with_open_batch_height_and_width(channelize: bool, strict: bool) -> None:
    module = block(channelize=channelize).eval()
    free = {0: Dim("n", min=1, max=64), 2: Dim("h", min=1, max=512), 3: Dim("w", min=1, max=512)}
    exported = torch.export.export(module, (torch.randn(2, 8, 9, 11),), dynamic_shapes=(free,), strict=strict).module()
    for n, h, w in [*SIZES, (1, 1, 1), (1, 1, 20), (4, 33, 1)]:
        features = torch.randn(n, 8, h, w)
        torch.testing.assert_close(exported(features), module(features))
