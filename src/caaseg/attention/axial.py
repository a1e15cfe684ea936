"""Attention along the columns and along the rows of a feature map.

Shapes: N batch, C value channels, D key channels, H rows, W columns. Both axes are treated as lines lying side by
side, (N, S, L, C): columns are S = W lines of L = H positions, rows are S = H lines of L = W positions.

Equations are numbered as in Huang et al., Channelized Axial Attention, AAAI 2022.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from caaseg.attention.checks import check_maps


def as_columns(features: Tensor) -> Tensor:
    """View a map as its columns, (N, C, H, W) -> (N, W, H, C)."""
    return features.permute(0, 3, 2, 1)


def as_rows(features: Tensor) -> Tensor:
    """View a map as its rows, (N, C, H, W) -> (N, H, W, C)."""
    return features.permute(0, 2, 3, 1)


def from_rows(rows: Tensor) -> Tensor:
    """View rows as a map again, (N, H, W, C) -> (N, C, H, W), channels last in memory."""
    return rows.permute(0, 3, 1, 2)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A region autocast does not touch; nothing at all where it is off, so that exported graphs stay plain."""
    active = _has_autocast(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if active else nullcontext()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def softmax_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax of unscaled dot products, (..., Q, D) and (..., K, D) -> (..., Q, K), in float32 or wider.

    A score is a sum of D products and sits in an exponent: rounded to bfloat16, a score of 64 is off by up to 0.25
    and its weight by a quarter. So half-precision keys are widened first, and autocast may not narrow them again.
    """
    with without_autocast(queries.device.type):
        wide = _widen(keys)
        scores = (wide if queries is keys else _widen(queries)) @ wide.transpose(-1, -2)
        return _softmax(scores)


def _softmax(scores: Tensor) -> Tensor:
    """The softmax over the last axis, for torch.compile in words of its own.

    By the name it would take a softmax between two products for attention of its own kind, and where a batch is one
    image exchange heads and positions: other numbers, or an error (seen with torch 2.13).
    """
    if not torch.compiler.is_dynamo_compiling():
        return scores.softmax(-1)
    powers = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return powers * powers.sum(-1, keepdim=True).reciprocal()


def _widen(keys: Tensor) -> Tensor:
    """In float32 or float64, and laid out line by line, so that the product neither copies nor keeps it twice."""
    return (keys if keys.dtype == torch.float64 else keys.float()).contiguous()


def column_weights(column_keys: Tensor) -> Tensor:
    """Attention of row i to row m within column j, Eq. (3): (N, D, H, W) -> (N, W, H, H), softmaxed over m."""
    columns = as_columns(column_keys)
    return softmax_scores(columns, columns)


def row_weights(row_keys: Tensor) -> Tensor:
    """Attention of column j to column n within row i, Eq. (4): (N, D, H, W) -> (N, H, W, W), softmaxed over n."""
    rows = as_rows(row_keys)
    return softmax_scores(rows, rows)


def gather(weights: Tensor, lines: Tensor) -> Tensor:
    """Sum each line's values with its own weights: (N, S, L, L) and (N, S, L, C) -> (N, S, L, C), in their dtype."""
    with without_autocast(lines.device.type):
        return weights.to(lines.dtype) @ lines


def axial_attention(column_keys: Tensor, row_keys: Tensor, values: Tensor) -> Tensor:
    """Gather along every column, then along every row, Eq. (5).

    Args:
        column_keys: the map that is query and key along columns, (N, D, H, W).
        row_keys: the map that is query and key along rows, (N, D, H, W).
        values: the features to gather, (N, C, H, W).

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    check_maps(values=values, column_keys=column_keys, row_keys=row_keys)
    gathered = gather(column_weights(column_keys), as_columns(values))  # (N, W, H, C)
    gathered = gather(row_weights(row_keys), gathered.transpose(1, 2))  # (N, H, W, C)
    return from_rows(gathered)
