"""Only some implementations build alpha, the weighted terms before the sum: a dispatch mode records all shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caaseg.attention import (
    ChannelGate,
    ChannelizedAxialAttention,
    Implementation,
    SelfAttention,
    channelized_axial_attention,
    channelized_self_attention,
)

N, C, D, H, W = 2, 24, 3, 10, 7


class Shapes(TorchDispatchMode):
    """Record the shape of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


def shapes_of(forward: Callable[[], Tensor]) -> set[tuple[int, ...]]:
    """Return the shapes of all tensors of a forward and backward pass."""
    shapes = Shapes()
    with shapes:
        forward().sum().backward()  # type: ignore[no-untyped-call]
    return shapes.shapes


def axial(implementation: Implementation, groups: int = 1) -> set[tuple[int, ...]]:
    maps = [torch.randn(N, channels, H, W, requires_grad=True) for channels in (D, D, C)]
    gates = ChannelGate(C, width=4), ChannelGate(C, width=4)
    return shapes_of(
        lambda: channelized_axial_attention(
            maps[0], maps[1], maps[2], *gates, implementation=implementation, groups=groups
        )
    )


def terms(shapes: set[tuple[int, ...]], lines: int, length: int) -> set[int]:
    """Return the numbers of queries per slice of the terms that were built along one axis."""
    return {shape[2] for shape in shapes if len(shape) == 5 and shape == (N, lines, shape[2], length, C)}


@pytest.mark.parametrize(
    ("groups", "columns", "rows"), [(1, {10}, {7}), (3, {4, 3}, {3, 2}), (4, {3, 2}, {2, 1}), (16, {1}, {1})]
)
def test_grouped_builds_slices_of_the_terms(groups: int, columns: set[int], rows: set[int]) -> None:
    shapes = axial("grouped", groups)
    assert columns <= terms(shapes, W, H) <= columns | {1}  # 1: the broadcast gate
    assert rows <= terms(shapes, H, W) <= rows | {1}


def test_loop_builds_the_terms_row_by_row_and_column_by_column() -> None:
    shapes = axial("loop")
    assert terms(shapes, W, H) == {1}
    assert terms(shapes, H, W) == {1}


@pytest.mark.parametrize("implementation", ["factorised", "auto"])
def test_the_factorised_form_builds_no_term(implementation: Implementation) -> None:
    shapes = axial(implementation)
    assert max(len(shape) for shape in shapes) == 4  # terms have five axes
    largest = max(torch.Size(shape).numel() for shape in shapes)
    assert largest == max(N * C * H * W, N * W * H * H, N * H * W * W)  # a map, or the attention of one axis


def test_channelized_self_attention_builds_no_term() -> None:
    queries, values = (torch.randn(N, channels, H, W, requires_grad=True) for channels in (D, C))
    gate = ChannelGate(C, width=4)
    shapes = shapes_of(lambda: channelized_self_attention(queries, queries, values, gate))
    assert max(torch.Size(shape).numel() for shape in shapes) <= max(N * (H * W) ** 2, N * C * H * W)


@pytest.mark.parametrize(
    "block",
    [
        ChannelizedAxialAttention(4, key_channels=D, value_channels=C, gate_width=4),
        SelfAttention(4, key_channels=D, value_channels=C, channelize=True, gate_width=4),
    ],
    ids=["axial", "self"],
)
def test_explain_stores_nothing_in_the_block(block: ChannelizedAxialAttention | SelfAttention) -> None:
    features = torch.randn(N, 4, H, W)
    block.eval()
    before = [sorted(vars(module)) for module in block.modules()]
    with torch.no_grad():
        maps = block.explain(features)
        torch.testing.assert_close(block(features), maps.output)
    assert before == [sorted(vars(module)) for module in block.modules()]
    assert isinstance(block(features), Tensor)
