"""Channelized axial attention, Eqs. (6) to (11), without ever building alpha and beta.

Write y[i, j, c] for plain column attention and r[i, j, c] for plain row attention over y. The paper weights the terms
of both sums by channel gates. But a gate does not depend on the index that is summed over, so

    column gate   g_col[i, c] = gate_col(sum over j of y[i, j, c] / HW)                    leaves the sum over m,
    row gate      g_row[j, c] = gate_row(sum over i of g_col[i, c] r[i, j, c] / HW)        leaves the sum over n,

and g_col, constant along an image row, passes through the row attention, which mixes pixels of one image row only:

    out[i, j, c] = g_row[j, c] * g_col[i, c] * r[i, j, c]

So the block is plain axial attention times two small gates: O(HW(C + H + W)) memory, against O(HHWC + HWWC).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from caaseg.attention.axial import (
    as_columns,
    column_weights,
    from_rows,
    gather,
    row_weights,
)
from caaseg.attention.checks import check_maps
from caaseg.attention.gate import Activation, ChannelGate, Gate, ask
from caaseg.attention.grouped import grouped_axial_attention
from caaseg.attention.projection import projection
from caaseg.kernels import HAS_TRITON

Implementation = Literal["auto", "factorised", "grouped", "loop", "fused"]
IMPLEMENTATIONS: tuple[str, ...] = ("auto", "factorised", "grouped", "loop", "fused")


class AxialMaps(NamedTuple):
    """What a channelized axial attention block saw and decided."""

    output: Tensor  # (N, C, H, W)
    column_weights: Tensor  # (N, W, H, H), attention of row i to row m within each column
    row_weights: Tensor  # (N, H, W, W), attention of column j to column n within each row
    column_gate: Tensor | None  # (N, H, C), one vector an image row; None where nothing gates this axis
    row_gate: Tensor | None  # (N, W, C), one vector an image column


def channelized_axial_attention(
    column_keys: Tensor,
    row_keys: Tensor,
    values: Tensor,
    column_gate: Gate | None,
    row_gate: Gate | None,
    *,
    implementation: Implementation = "auto",
    groups: int = 16,
) -> Tensor:
    """Axial attention whose terms are weighted by channel gates before they are summed, Eqs. (3) to (11).

    Args:
        column_keys: the map that is query and key along columns, (N, D, H, W).
        row_keys: the map that is query and key along rows, (N, D, H, W).
        values: the features to gather, (N, C, H, W).
        column_gate: channel weights from features pooled over an image row, (N, H, C) -> (N, H, C), each position
            on its own; None leaves the columns ungated.
        row_gate: likewise for image columns, (N, W, C) -> (N, W, C).
        implementation: all give the same numbers. "factorised" never builds the terms; "grouped" builds them for
            `groups` slices in turn, as the paper does; "loop" builds them row by row and column by column; "fused" is
            GPU kernels, and raises where they do not apply; "auto" takes the fastest that applies.
        groups: number of slices of "grouped".

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    check_maps(values=values, column_keys=column_keys, row_keys=row_keys)
    check_implementation(implementation, groups)
    # Of 32-bit numbers the libraries' own products are as fast, and have no kernels to compile first.
    if implementation == "fused" or (implementation == "auto" and values.is_cuda and values.dtype != torch.float32):
        problem = _why_not_fused(column_keys, row_keys, values)
        if problem is None:
            from caaseg.attention.fused import fused_axial_attention

            return fused_axial_attention(column_keys, row_keys, values, column_gate, row_gate)
        if implementation == "fused":
            raise ValueError(f"implementation is 'fused', but {problem}; use 'auto', which takes the fastest there is")
    by_column, by_row = column_weights(column_keys), row_weights(row_keys)  # (N, W, H, H), (N, H, W, W)
    if implementation in ("grouped", "loop"):
        slices = groups if implementation == "grouped" else max(values.shape[2:])
        return grouped_axial_attention(by_column, by_row, values, column_gate, row_gate, slices)
    return _factorised(by_column, by_row, values, column_gate, row_gate).output


def check_implementation(implementation: str, groups: int) -> None:
    """Refuse an implementation nobody knows, and a number of groups that cannot be made."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise ValueError(
            f"groups is {groups!r}; expected a whole number: 1 (full vectorization) or more (smaller slices)"
        )


def _why_not_fused(column_keys: Tensor, row_keys: Tensor, values: Tensor) -> str | None:
    """What keeps the fused kernels from this; None where they apply."""
    # To torch.compile itself older versions of torch say that they export.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return "the model is being exported; expected an ordinary call"  # other software has no such operators
    if not HAS_TRITON:
        return "the package triton is not installed; it comes with torch for GPUs"
    from caaseg.attention.fused import why_not

    return why_not(column_keys, row_keys, values)


def _factorised(
    by_column: Tensor, by_row: Tensor, values: Tensor, column_gate: Gate | None, row_gate: Gate | None
) -> AxialMaps:
    """Plain axial attention, its gates found on the way and both applied at the end."""
    height, width = values.shape[2:]
    y = gather(by_column, as_columns(values))  # (N, W, H, C)
    g_col = None if column_gate is None else ask(column_gate, y.mean(1) / height, "column_gate")  # (N, H, C)
    r = gather(by_row, y.transpose(1, 2))  # (N, H, W, C)
    del y  # a map less while the gates are applied
    g_row = None
    if g_col is not None and row_gate is not None and torch.is_grad_enabled():
        t, pooled = _gate_rows(r, g_col)  # (N, H, W, C), (N, W, C)
        g_row = ask(row_gate, pooled / width, "row_gate")  # (N, W, C)
        r = _gate_columns(t, g_row, r, g_col)
    else:
        if g_col is not None:
            r = r * g_col.unsqueeze(2)
        if row_gate is not None:
            g_row = ask(row_gate, r.mean(1) / width, "row_gate")  # (N, W, C)
            r = r * g_row.unsqueeze(1)
    return AxialMaps(from_rows(r), by_column, by_row, g_col, g_row)


# Left to itself, autograd keeps t = g_col * r beside r, and holds several more maps at once on its way back. These two
# functions keep r alone, give its gradient in one piece, and work through products of maps a quarter at a time.


def _gate_rows(r: Tensor, g_col: Tensor) -> tuple[Tensor, Tensor]:
    """The product t = g_col * r and its mean over i, for r (N, H, W, C), g_col (N, H, C) -> (N, H, W, C), (N, W, C)."""
    t, pooled = _GateRows.apply(r, g_col.unsqueeze(2))  # type: ignore[no-untyped-call]
    return t, pooled


def _gate_columns(t: Tensor, g_row: Tensor, r: Tensor, g_col: Tensor) -> Tensor:
    """The product t * g_row, for t = g_col * r (N, H, W, C) and g_row (N, W, C); t is made again when needed."""
    gated: Tensor = _GateColumns.apply(t, g_row.unsqueeze(1), r, g_col.unsqueeze(2))  # type: ignore[no-untyped-call]
    return gated


class _GateRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(r: Tensor, g_col: Tensor) -> tuple[Tensor, Tensor]:  # (N, H, W, C), (N, H, 1, C)
        t = r * g_col
        return t, t.mean(1)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_t: Tensor, grad_pooled: Tensor) -> tuple[Tensor, Tensor]:
        r, g_col = ctx.saved_tensors  # type: ignore[attr-defined]
        spread = grad_pooled.unsqueeze(1) / r.shape[1]  # (N, 1, W, C)
        if torch.is_grad_enabled():  # second derivatives are wanted: nothing may be overwritten
            grad_t = grad_t + spread
            return grad_t * g_col, _sum_of_products(2, grad_t, r)
        grad_t = grad_t.add_(spread)  # made by _GateColumns for this place alone
        grad_col = _sum_of_products(2, grad_t, r)
        return grad_t.mul_(g_col), grad_col


class _GateColumns(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, g_row: Tensor, r: Tensor, g_col: Tensor) -> Tensor:
        return t * g_row  # (N, H, W, C), (N, 1, W, C)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        g_row, r, g_col = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_row = _sum_of_products(1, grad, r, g_col)
        return grad * g_row, grad_row, None, None


def _sum_of_products(axis: int, *factors: Tensor) -> Tensor:
    """The sum over one axis of a product of maps, kept as an axis of one, for a quarter of the channels at a time."""
    sums = []
    for first, *others in zip(*(factor.chunk(4, dim=-1) for factor in factors), strict=True):
        product = first
        for other in others:
            product = product * other
        sums.append(product.sum(axis, keepdim=True))
    return torch.cat(sums, dim=-1)


class ChannelizedAxialAttention(nn.Module):
    """The CAA block: projections, attention along columns and rows, channel gates on both (Huang et al., AAAI 2022).

    Args:
        in_channels: channels of the input map.
        key_channels: channels D of each axis' query = key map.
        value_channels: channels C of the value map, and of the output.
        gate_layers: hidden layers of each gate.
        gate_width: units of a hidden layer.
        gate_activation: "leaky_relu" (slope 0.2) or "relu".
        channelize: False leaves the gates out: plain axial attention, the baseline of the paper's ablations.
        implementation: see `channelized_axial_attention`.
        groups: number of slices of "grouped".
    """

    def __init__(
        self,
        in_channels: int,
        *,
        key_channels: int = 64,
        value_channels: int = 512,
        gate_layers: int = 5,
        gate_width: int = 128,
        gate_activation: Activation = "leaky_relu",
        channelize: bool = True,
        implementation: Implementation = "auto",
        groups: int = 16,
    ) -> None:
        super().__init__()
        check_implementation(implementation, groups)
        self.column_keys = projection(in_channels, key_channels)
        self.row_keys = projection(in_channels, key_channels)
        self.values = projection(in_channels, value_channels)
        self.column_gate: ChannelGate | None = None
        self.row_gate: ChannelGate | None = None
        if channelize:
            self.column_gate, self.row_gate = (
                ChannelGate(value_channels, layers=gate_layers, width=gate_width, activation=gate_activation)
                for _ in range(2)
            )
        self.implementation = implementation
        self.groups = groups

    def forward(self, features: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, value_channels, H, W)."""
        maps = self.column_keys(features), self.row_keys(features), self.values(features)
        return channelized_axial_attention(
            *maps, self.column_gate, self.row_gate, implementation=self.implementation, groups=self.groups
        )

    def explain(self, features: Tensor) -> AxialMaps:
        """The output with the attention and the gates that made it: for drawing, not for training."""
        column_keys, row_keys, values = self.column_keys(features), self.row_keys(features), self.values(features)
        return _factorised(column_weights(column_keys), row_weights(row_keys), values, self.column_gate, self.row_gate)
