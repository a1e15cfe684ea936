"""Rows of panels."""

import numpy as np
import pytest

from caaseg.drawing.panels import MAX_COLUMNS, Row, draw_panels


def corners(columns: int) -> list[tuple[float, float]]:
    """Return the left and top edges of the panels of two rows, as shares of the figure."""
    rows = [Row(f"image {k}", [np.zeros((40, 60, 3), np.uint8)] * columns) for k in range(2)]
    figure = draw_panels(rows, [f"column {k}" for k in range(columns)], classes=[("road", (1, 2, 3))])
    return [(axes.get_position().x0, 1 - axes.get_position().y1) for axes in figure.axes]


def test_a_row_with_few_columns_is_one_line() -> None:
    panels = corners(MAX_COLUMNS)
    for row in (panels[:MAX_COLUMNS], panels[MAX_COLUMNS:]):
        assert [left for left, _ in row] == sorted({left for left, _ in row})
        assert [top for _, top in row] == pytest.approx([row[0][1]] * MAX_COLUMNS)
    assert panels[MAX_COLUMNS][1] > panels[0][1]


def test_a_row_with_many_columns_is_wrapped_into_two_lines() -> None:
    panels = corners(MAX_COLUMNS + 1)  # 4 and 3 panels per line
    lines = [panels[:4], panels[4:7], panels[7:11], panels[11:]]
    for line in lines:
        assert [left for left, _ in line] == pytest.approx([left for left, _ in panels[: len(line)]])
        assert [top for _, top in line] == pytest.approx([line[0][1]] * len(line))
    tops = [line[0][1] for line in lines]
    assert tops == sorted(tops)
    assert max(left for left, _ in panels) < 1
