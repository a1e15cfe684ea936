"""Pictures of pixel attention."""

import numpy as np
import torch

from caaseg.analysis.pixel_attention import PixelAttention
from caaseg.reports.pixel_attention import COLUMN, ROW, draw_lines, draw_reach

GRAY = np.full((40, 60, 3), 120, np.uint8)  # enlarged ten times
ATTENTION = PixelAttention(
    cell=(1, 0),
    column=torch.tensor([0.9, 0.09, 0.01, 0.0]),
    row=torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0, 0.0]),
    reach=torch.tensor([[0.1, 0, 0, 0, 0, 0], [0.2, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 0.7]]),
    gates=torch.tensor([0.5, 0.1, 0.9, 0.3]),
)


def test_lines_are_bright_where_the_weights_are() -> None:
    drawn = draw_lines(GRAY, ATTENTION, (13, 0))
    assert drawn is not None
    assert drawn.shape == (400, 600, 3)
    dark = drawn[390, 590].astype(int)
    top, below = drawn[5, 5].astype(int), drawn[270, 5].astype(int)  # weights of 0.9 and 0.01 in the column
    assert np.abs(top - np.array(COLUMN)).max() < 40
    assert dark.sum() < below.sum() < top.sum()
    assert (drawn[390, 5] == dark).all()  # no weight, no light
    along = drawn[130, 150].astype(float)  # half of the strongest weight of the row
    assert np.abs(along / along.max() - np.array(ROW) / max(ROW)).max() < 0.15


def test_reach_is_brightest_at_the_largest_weight() -> None:
    drawn = draw_reach(GRAY, ATTENTION, (13, 0)).astype(int).sum(-1)
    assert drawn[390, 590] == drawn[200:].max()  # below the ring
    assert drawn[390, 5] < drawn[5, 5] < drawn[390, 590]
