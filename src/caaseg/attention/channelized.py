"""Channelized axial attention, Eqs. (6) to (11), without building alpha and beta.

Let y[i, j, c] be plain column attention and r[i, j, c] plain row attention over y. The paper weights the terms of both
sums by channel gates. A gate does not depend on the index of the sum, so

    column gate   g_col[i, c] = gate_col(sum over j of y[i, j, c] / HW)                 factors out of the sum over m,
    row gate      g_row[j, c] = gate_row(sum over i of g_col[i, c] r[i, j, c] / HW)     factors out of the sum over n,

and g_col, constant along an image row, commutes with row attention, which mixes pixels of one image row only:

    out[i, j, c] = g_row[j, c] * g_col[i, c] * r[i, j, c]

So the block is plain axial attention times two small gates: O(HW(C + H + W)) memory, against O(HHWC + HWWC).
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from caaseg.attention.axial import as_columns, column_weights, from_rows, gather, row_weights
from caaseg.attention.checks import check_maps
from caaseg.attention.fused import fused_axial_attention, unsupported_reason
from caaseg.attention.gate import Activation, ChannelGate, Gate, apply_gate
from caaseg.attention.grouped import grouped_axial_attention
from caaseg.attention.projection import projection

Implementation = Literal["auto", "factorised", "grouped", "loop", "fused"]
"""How channelized axial attention is computed; `channelized_axial_attention` describes the choices."""
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


class AxialMaps(NamedTuple):
    """Output, attention weights and gates of a channelized axial attention block."""

    output: Tensor  # (N, C, H, W)
    column_weights: Tensor  # (N, W, H, H), attention of row i to row m within each column
    row_weights: Tensor  # (N, H, W, W), attention of column j to column n within each row
    column_gate: Tensor | None  # (N, H, C), one vector per image row; None without a gate
    row_gate: Tensor | None  # (N, W, C), one vector per image column


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
    """Compute axial attention whose terms are weighted by channel gates before the sum, Eqs. (3) to (11).

    Args:
        column_keys: queries and keys along columns, (N, D, H, W).
        row_keys: queries and keys along rows, (N, D, H, W).
        values: features to gather, (N, C, H, W).
        column_gate: channel weights from features pooled over an image row, (N, H, C) -> (N, H, C), positions
            independent of each other; None for no gate.
        row_gate: the same for image columns, (N, W, C) -> (N, W, C).
        implementation: all give the same numbers. "factorised" does not build the terms; "grouped" builds them in
            `groups` slices, like the paper; "loop" builds them row by row and column by column; "fused" uses GPU
            kernels and raises ValueError if they do not apply; "auto" chooses the fastest that applies.
        groups: number of slices of "grouped".

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    check_maps(values=values, column_keys=column_keys, row_keys=row_keys)
    check_implementation(implementation, groups)
    # In float32 the factorised form is as fast, and has no kernels to compile.
    if implementation == "fused" or (implementation == "auto" and values.is_cuda and values.dtype != torch.float32):
        problem = unsupported_reason(column_keys, row_keys, values)
        if problem is None:
            return fused_axial_attention(column_keys, row_keys, values, column_gate, row_gate)
        if implementation == "fused":
            raise ValueError(f"implementation is 'fused', but {problem}; use 'auto'")
    by_column, by_row = column_weights(column_keys), row_weights(row_keys)  # (N, W, H, H), (N, H, W, W)
    if implementation in ("grouped", "loop"):
        slices = groups if implementation == "grouped" else max(values.shape[2:])
        return grouped_axial_attention(by_column, by_row, values, column_gate, row_gate, slices)
    return _factorised(by_column, by_row, values, column_gate, row_gate).output


def check_implementation(implementation: str, groups: int) -> None:
    """Raise ValueError for an unknown implementation or an invalid number of groups."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise ValueError(f"groups is {groups!r}; expected an integer: 1 (full vectorization) or more (smaller slices)")


def _factorised(
    by_column: Tensor, by_row: Tensor, values: Tensor, column_gate: Gate | None, row_gate: Gate | None
) -> AxialMaps:
    """Compute plain axial attention and both gates, and apply the gates to the result."""
    height, width = values.shape[2:]
    y = gather(by_column, as_columns(values))  # (N, W, H, C)
    g_col = None if column_gate is None else apply_gate(column_gate, y.mean(1) / height, "column_gate")  # (N, H, C)
    r = gather(by_row, y.transpose(1, 2))  # (N, H, W, C)
    del y  # saves memory while the gates are applied
    g_row = None
    if g_col is not None and row_gate is not None and torch.is_grad_enabled():
        t, pooled = _gate_rows(r, g_col)  # (N, H, W, C), (N, W, C)
        g_row = apply_gate(row_gate, pooled / width, "row_gate")  # (N, W, C)
        r = _gate_columns(t, g_row, r, g_col)
    else:
        if g_col is not None:
            r = r * g_col.unsqueeze(2)
        if row_gate is not None:
            g_row = apply_gate(row_gate, r.mean(1) / width, "row_gate")  # (N, W, C)
            r = r * g_row.unsqueeze(1)
    return AxialMaps(from_rows(r), by_column, by_row, g_col, g_row)


# By default, autograd saves t = g_col * r in addition to r and allocates several maps in the backward pass. These two
# functions save r only, return its gradient at once, and multiply maps a quarter of the channels at a time.


def _gate_rows(r: Tensor, g_col: Tensor) -> tuple[Tensor, Tensor]:
    """Return t = g_col * r and its mean over i, for r (N, H, W, C), g_col (N, H, C) -> (N, H, W, C), (N, W, C)."""
    t, pooled = _GateRows.apply(r, g_col.unsqueeze(2))  # type: ignore[no-untyped-call]
    return t, pooled


def _gate_columns(t: Tensor, g_row: Tensor, r: Tensor, g_col: Tensor) -> Tensor:
    """Return t * g_row, for t = g_col * r (N, H, W, C) and g_row (N, W, C); t is recomputed in the backward pass."""
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
        if torch.is_grad_enabled():  # second derivatives need the tensors that the code below overwrites
            grad_t = grad_t + spread
            return grad_t * g_col, _sum_of_products(2, grad_t, r)
        grad_t = grad_t.add_(spread)  # in place: _GateColumns allocated it, nothing else uses it
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
    """Return the sum of a product of maps over an axis (keepdim), computed for a quarter of the channels at a time."""
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
        key_channels: channels D of queries and keys.
        value_channels: channels C of values and output.
        gate_layers: hidden layers of each gate.
        gate_width: units per hidden layer.
        gate_activation: "leaky_relu" (slope 0.2) or "relu".
        channelize: False for plain axial attention without gates, the baseline of the paper's ablations.
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
        """Return the output with its attention weights and gates; for figures, not for training.

        Args:
            features: (N, in_channels, H, W).
        """
        column_keys, row_keys, values = self.column_keys(features), self.row_keys(features), self.values(features)
        return _factorised(column_weights(column_keys), row_weights(row_keys), values, self.column_gate, self.row_gate)
