"""The CCNet head: criss-cross attention (Huang et al., ICCV 2019).

Shapes: N batch, C channels, D key channels, H rows, W columns.
"""

import torch
from torch import Tensor, nn

from caaseg.attention.axial import as_columns, as_rows, from_rows, without_autocast
from caaseg.config import Architecture
from caaseg.models.heads.concat import ConcatHead


def criss_cross_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from every pixel to its column and its row, with one softmax over their H + W - 1 pixels.

    The dot products are not scaled; they and the softmax are computed in float32 or float64.

    Args:
        queries: (N, D, H, W).
        keys: (N, D, H, W).
        values: features to gather, (N, C, H, W).

    Returns:
        (N, C, H, W) in the dtype of values, channels last in memory.
    """
    height = values.shape[2]
    with without_autocast(values.device.type):
        queries, keys = (maps.to(torch.promote_types(maps.dtype, torch.float32)) for maps in (queries, keys))
        columns = as_columns(queries) @ as_columns(keys).transpose(2, 3)  # (N, W, H, H)
        rows = as_rows(queries) @ as_rows(keys).transpose(2, 3)  # (N, H, W, W)
        positions = torch.arange(height, device=values.device)
        own = positions[:, None] == positions  # a pixel itself counts once, in its row
        columns = columns.masked_fill(own, -torch.inf).transpose(1, 2)  # (N, H, W, H)
        weights = torch.cat([columns, rows], dim=3).softmax(3).to(values.dtype)  # (N, H, W, H + W)
        gathered = weights[..., :height].transpose(1, 2) @ as_columns(values)  # (N, W, H, C)
        return from_rows(gathered.transpose(1, 2) + weights[..., height:] @ as_rows(values))


class CrissCrossAttention(nn.Module):
    """Criss-cross attention, added to the features with a learned weight that starts at 0.

    Applied twice, every pixel gets information from all pixels.

    Args:
        channels: channels of input and output; keys have an eighth of them.
        recurrence: how often the attention is applied, with the same weights.
    """

    def __init__(self, channels: int, *, recurrence: int = 2) -> None:
        super().__init__()
        key_channels = max(channels // 8, 1)
        self.queries = nn.Conv2d(channels, key_channels, 1)
        self.keys = nn.Conv2d(channels, key_channels, 1)
        self.values = nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.zeros(()))
        self.recurrence = recurrence

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        for _ in range(self.recurrence):
            attended = criss_cross_attention(self.queries(features), self.keys(features), self.values(features))
            features = features + self.scale.to(attended.dtype) * attended
        return features


class CCNetHead(ConcatHead):
    """Criss-cross attention between two 3x3 convolutions, applied `config.recurrence` times."""

    title = "CCNet"
    without_attention = (
        "A CCNet head attends to the column and the row of a pixel at once, twice in sequence. It has no separate "
        "attention along columns and rows that can be shown."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__(in_channels, config, CrissCrossAttention(config.channels, recurrence=config.recurrence))
