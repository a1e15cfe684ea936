"""Figures in the manner of papers: a row an image, a column what was made of it, and a legend below."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import NDArray
from torch import Tensor

from caaseg.data.sample import IGNORE, Color
from caaseg.drawing.sheet import overlay, patch

WIDTH = 12.0  # inches, as the next ones
GAP = 0.05
HEADING = 0.32
NOTE = 0.3
LEGEND_LINE = 0.25
LEGEND_COLUMNS = 7
MOST_ACROSS = 6
STRENGTH = 0.8  # of classes over the image: enough to be told apart when small

Legend = Sequence[tuple[str, Color]]


class Box(NamedTuple):
    """A rectangle of pixels; bottom and right are behind the last."""

    top: int
    left: int
    bottom: int
    right: int


class Row(NamedTuple):
    """An image, with what was made of it."""

    note: str
    panels: Sequence[NDArray[np.uint8]]  # (H, W, 3) each, a panel a column
    boxes: Sequence[Box] = ()  # drawn into every panel


def draw_panels(rows: Sequence[Row], columns: Sequence[str], *, classes: Legend, marks: Legend = ()) -> Figure:
    """Draw the rows under the columns' names, with a legend of classes and, if there are, of marks above it.

    Where there are many columns, a row is folded into two lines.
    """
    folded = len(columns) > MOST_ACROSS
    across = -(-len(columns) // 2) if folded else len(columns)
    width = (WIDTH - GAP * (across - 1)) / across
    heights = [width * row.panels[0].shape[0] / row.panels[0].shape[1] for row in rows]
    headings = [HEADING if folded or number == 0 else 0.0 for number in range(len(rows))]
    lines = -(-len(marks) // 2) + -(-len(classes) // LEGEND_COLUMNS)
    pictures = sum((1 + folded) * (heading + height) for heading, height in zip(headings, heights, strict=True))
    figure = Figure(figsize=(WIDTH, pictures + NOTE * len(rows) + LEGEND_LINE * lines + 0.15))
    top = 0.0
    for row, heading, height in zip(rows, headings, heights, strict=True):
        for number, (pixels, column) in enumerate(zip(row.panels, columns, strict=True)):
            if number % across == 0:
                top += heading + (height if number > 0 else 0.0)
            panel = placed(figure, number % across * (width + GAP), top, width, height)
            panel.imshow(pixels, interpolation="antialiased", aspect="auto")
            panel.axis("off")
            if heading:
                panel.set_title(column, fontsize=13, pad=5)
            _draw_boxes(panel, row.boxes)
        top += height
        below = 1 - (top + GAP) / figure.get_figheight()
        figure.text(0.002, below, row.note, fontsize=10.5, color="#444444", va="top")
        top += NOTE
    for legend, across in ((marks, 2), (classes, LEGEND_COLUMNS)):
        if legend:
            _draw_legend(figure, legend, top, across)
            top += LEGEND_LINE * -(-len(legend) // across)
    return figure


def placed(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches from the upper left corner."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _draw_legend(figure: Figure, legend: Legend, top: float, across: int) -> None:
    high = figure.get_size_inches()[1]
    # Filled by columns, it is to be read by rows.
    in_order = [legend[k] for column in range(across) for k in range(column, len(legend), across)]
    figure.legend(
        handles=[patch(name, color) for name, color in in_order],
        loc="upper left",
        bbox_to_anchor=(0, 1 - top / high),
        ncols=across,
        frameon=False,
        fontsize=11,
        columnspacing=1.4,
        borderpad=0.1,
        borderaxespad=0.2,
    )


def _draw_boxes(panel: Axes, boxes: Sequence[Box]) -> None:
    """White on black, which is seen on every color; a little within, so that neighbours stay apart."""
    inset = 0.006 * (panel.get_xlim()[1] - panel.get_xlim()[0])
    for box in boxes:
        corner = box.left - 0.5 + inset, box.top - 0.5 + inset
        width, height = box.right - box.left - 2 * inset, box.bottom - box.top - 2 * inset
        frame = Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=1.4)
        frame.set_path_effects([Stroke(linewidth=3, foreground="black"), Normal()])
        panel.add_patch(frame)


def labels_over(image: Tensor, labels: Tensor, palette: Sequence[Color]) -> NDArray[np.uint8]:
    """A panel of labels or predictions (H, W) over their image (3, H, W)."""
    return overlay(image.permute(1, 2, 0).numpy(), labels.numpy(), palette, STRENGTH)


def legend_of(labels: Sequence[Tensor], classes: Sequence[str], palette: Sequence[Color]) -> list[tuple[str, Color]]:
    """The classes that labels and predictions have, with their colors."""
    seen = np.unique(np.concatenate([np.unique(one.numpy()) for one in labels]))
    known: list[tuple[str, Color]] = [(classes[k], palette[k]) for k in seen if k != IGNORE]
    return [*known, ("ignored", (0, 0, 0))] if IGNORE in seen else known
