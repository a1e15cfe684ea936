"""The paper's definitions with every term written out, independent of the implementations under test."""

import torch
from torch import Tensor

from caaseg.attention import Gate


def axial_by_definition(
    column_keys: Tensor, row_keys: Tensor, values: Tensor, column_gate: Gate | None, row_gate: Gate | None
) -> Tensor:
    """Compute channelized axial attention from keys (N, D, H, W) and values (N, C, H, W)."""
    height, width = values.shape[2:]
    a_col = torch.einsum("ndij,ndmj->nijm", column_keys, column_keys).softmax(-1)  # Eq. (3)
    a_row = torch.einsum("ndij,ndik->nijk", row_keys, row_keys).softmax(-1)  # Eq. (4)

    alpha = torch.einsum("nijm,ncmj->ncijm", a_col, values)  # Eq. (6)
    if column_gate is not None:  # Eq. (9)
        pooled = alpha.sum((3, 4)) / (height * width)  # (N, C, H)
        alpha = alpha * column_gate(pooled.transpose(1, 2)).transpose(1, 2)[:, :, :, None, None]
    x = alpha.sum(4)  # (N, C, H, W)

    beta = torch.einsum("nijk,ncik->ncijk", a_row, x)  # Eq. (7)
    if row_gate is not None:  # Eq. (10)
        pooled = beta.sum((2, 4)) / (height * width)  # (N, C, W)
        beta = beta * row_gate(pooled.transpose(1, 2)).transpose(1, 2)[:, :, None, :, None]
    return beta.sum(4)  # Eq. (11)


def spatial_by_definition(queries: Tensor, keys: Tensor, values: Tensor, gate: Gate | None) -> Tensor:
    """Compute channelized self-attention from queries and keys (N, D, H, W) and values (N, C, H, W)."""
    count = values.shape[2] * values.shape[3]
    q, k, v = queries.flatten(2), keys.flatten(2), values.flatten(2)
    weights = torch.einsum("ndp,ndq->npq", q, k).softmax(-1)  # Eq. (2)
    alpha = torch.einsum("npq,ncq->npqc", weights, v)  # every term of Eq. (1)
    if gate is not None:
        alpha = alpha * gate(alpha.sum(2) / count).unsqueeze(2)
    return alpha.sum(2).transpose(1, 2).reshape(values.shape)
