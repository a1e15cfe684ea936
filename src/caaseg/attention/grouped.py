"""Algorithm 1 of the paper: build the weighted terms, gate them, then sum them.

This is the reference implementation. Benchmarks use it to repeat the paper's figure of time against number of groups.
The factorised form in `channelized.py` gives the same numbers without building the terms.

Shapes: N batch, S lines, L positions on a line, C channels, G groups.
"""

import torch
from torch import Tensor

from caaseg.attention.axial import as_columns, from_rows
from caaseg.attention.gate import Gate, apply_gate


def channelize_in_groups(weights: Tensor, lines: Tensor, gate: Gate | None, groups: int, name: str) -> Tensor:
    """Compute channelized attention along one axis, Eqs. (6), (9) and the sum of (11), in `groups` slices of queries.

    A slice of the terms, alpha[s, i, m, c] = weights[s, i, m] * lines[s, m, c], holds N*S*(L/G)*L*C numbers: one group
    is full vectorization, L groups are one query each.

    Algorithm 1 pads the L queries to equal groups. Here group sizes differ by at most one, without padding.

    Args:
        weights: attention of position i to position m, softmaxed over m, (N, S, L, L).
        lines: features to gather, (N, S, L, C).
        gate: channel weights from pooled terms, or None for plain attention.
        groups: number of slices, clamped to L.
        name: name of the gate in error messages.
    """
    if lines.stride(-1) != 1:  # contiguous channels, for fast access to every term
        lines = lines.contiguous()
    slices = weights.to(lines.dtype).tensor_split(min(groups, lines.shape[2]), dim=2)  # (N, S, L/G, L) each
    return torch.cat([_channelize(part, lines, gate, name) for part in slices], dim=2)  # (N, S, L, C)


def _channelize(weights: Tensor, lines: Tensor, gate: Gate | None, name: str) -> Tensor:
    """Compute one slice: (N, S, L/G, L) and (N, S, L, C) -> (N, S, L/G, C)."""
    # The dtype of sums is explicit, because autocast would convert the terms to float32.
    alpha = weights.unsqueeze(-1) * lines.unsqueeze(2)  # (N, S, L/G, L, C)
    if gate is not None:
        # (N, L/G, C), the sum over s and m divided by H*W
        pooled = alpha.sum(3, dtype=lines.dtype).mean(1) / lines.shape[2]
        gates = apply_gate(gate, pooled, name).unsqueeze(1).expand(-1, lines.shape[1], -1, -1)  # (N, S, L/G, C)
        alpha = alpha * gates.unsqueeze(3)  # (N, S, L/G, L, C)
    return alpha.sum(3, dtype=lines.dtype)


def grouped_axial_attention(
    column_attention: Tensor,
    row_attention: Tensor,
    values: Tensor,
    column_gate: Gate | None,
    row_gate: Gate | None,
    groups: int,
) -> Tensor:
    """Compute Eqs. (6) to (11) literally: channelized columns, then channelized rows of their result."""
    columns = channelize_in_groups(column_attention, as_columns(values), column_gate, groups, "column_gate")
    rows = columns.transpose(1, 2)  # (N, H, W, C)
    return from_rows(channelize_in_groups(row_attention, rows, row_gate, groups, "row_gate"))
