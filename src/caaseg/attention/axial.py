"""Attention along the columns and along the rows of a feature map.

Shapes: N batch, C value channels, D key channels, H rows, W columns. Both axes are treated as S lines of L positions,
(N, S, L, C): columns are S = W lines of L = H positions, rows are S = H lines of L = W positions.

Equations are numbered as in Huang et al., Channelized Axial Attention, AAAI 2022.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from caaseg.attention.checks import check_maps


def as_columns(features: Tensor) -> Tensor:
    """View a map as columns, (N, C, H, W) -> (N, W, H, C)."""
    return features.permute(0, 3, 2, 1)


def as_rows(features: Tensor) -> Tensor:
    """View a map as rows, (N, C, H, W) -> (N, H, W, C)."""
    return features.permute(0, 2, 3, 1)


def from_rows(rows: Tensor) -> Tensor:
    """View rows as a map, (N, H, W, C) -> (N, C, H, W), channels last in memory."""
    return rows.permute(0, 3, 1, 2)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context that disables autocast; a null context if it is off already, so that exported graphs are plain.

    Args:
        device_type: type of the device that computes, such as "cuda".
    """
    active = _has_autocast(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if active else nullcontext()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def softmax_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the softmax of unscaled dot products, (..., Q, D) and (..., K, D) -> (..., Q, K), in float32 or float64.

    In bfloat16, a score of 64 has a rounding error of up to 0.25, and its weight an error of about a quarter. So this
    function converts half-precision keys to float32 first and disables autocast.
    """
    with without_autocast(queries.device.type):
        wide_keys = _to_float32(keys)
        scores = (wide_keys if queries is keys else _to_float32(queries)) @ wide_keys.transpose(-1, -2)
        return _softmax(scores)


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last axis, spelled out under torch.compile.

    torch.compile (2.13) replaces a softmax between two matrix products with its own attention kernel. For a batch of
    one image, that kernel confuses heads and positions: it returns wrong numbers or raises an error.
    """
    if not torch.compiler.is_dynamo_compiling():
        return scores.softmax(-1)
    exps = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return exps * exps.sum(-1, keepdim=True).reciprocal()


def _to_float32(keys: Tensor) -> Tensor:
    """Convert to float32 unless float64; contiguous, so that the matrix product neither copies nor saves a copy."""
    return (keys if keys.dtype == torch.float64 else keys.float()).contiguous()


def column_weights(column_keys: Tensor) -> Tensor:
    """Return attention of row i to row m within column j, Eq. (3): (N, D, H, W) -> (N, W, H, H), softmax over m."""
    columns = as_columns(column_keys)
    return softmax_scores(columns, columns)


def row_weights(row_keys: Tensor) -> Tensor:
    """Return attention of column j to column n within row i, Eq. (4): (N, D, H, W) -> (N, H, W, W), softmax over n."""
    rows = as_rows(row_keys)
    return softmax_scores(rows, rows)


def gather(weights: Tensor, lines: Tensor) -> Tensor:
    """Weight and sum the values of each line: (N, S, L, L) and (N, S, L, C) -> (N, S, L, C), in the dtype of lines."""
    with without_autocast(lines.device.type):
        return weights.to(lines.dtype) @ lines


def axial_attention(column_keys: Tensor, row_keys: Tensor, values: Tensor) -> Tensor:
    """Attend along every column, then along every row, Eq. (5).

    Args:
        column_keys: queries and keys along columns, (N, D, H, W).
        row_keys: queries and keys along rows, (N, D, H, W).
        values: features to gather, (N, C, H, W).

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    check_maps(values=values, column_keys=column_keys, row_keys=row_keys)
    gathered = gather(column_weights(column_keys), as_columns(values))  # (N, W, H, C)
    gathered = gather(row_weights(row_keys), gathered.transpose(1, 2))  # (N, H, W, C)
    return from_rows(gathered)
