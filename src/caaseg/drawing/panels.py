"""Result figures as in papers: one row per image, one column per model or view, and a legend below."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import NDArray
from torch import Tensor

from caaseg.data.sample import Color
from caaseg.drawing.overlays import Legend, overlay

# Lengths in inches.
WIDTH = 12.0
GAP = 0.05
TITLE_HEIGHT = 0.32
CAPTION_HEIGHT = 0.3
LEGEND_LINE_HEIGHT = 0.25

LEGEND_COLUMNS = 7
MAX_COLUMNS = 6
OPACITY = 0.8  # of class colors: high, so that classes differ visibly in small panels


class Box(NamedTuple):
    """A rectangle of pixels. Bottom and right are exclusive."""

    top: int
    left: int
    bottom: int
    right: int


class Row(NamedTuple):
    """The panels of one image."""

    caption: str
    panels: Sequence[NDArray[np.uint8]]  # (H, W, 3) each, one per column
    boxes: Sequence[Box] = ()  # drawn into every panel


def draw_panels(rows: Sequence[Row], columns: Sequence[str], *, classes: Legend, marks: Legend = ()) -> Figure:
    """Draw rows of panels under the column titles, then a legend of the marks, if any, and of the classes.

    With more than MAX_COLUMNS columns, each row is wrapped into two lines.
    """
    wrapped = len(columns) > MAX_COLUMNS
    per_line = -(-len(columns) // 2) if wrapped else len(columns)
    width = (WIDTH - GAP * (per_line - 1)) / per_line
    heights = [width * row.panels[0].shape[0] / row.panels[0].shape[1] for row in rows]
    titles = [TITLE_HEIGHT if wrapped or index == 0 else 0.0 for index in range(len(rows))]
    legends = [(legend, ncols) for legend, ncols in ((marks, 2), (classes, LEGEND_COLUMNS)) if legend]
    legend_lines = sum(-(-len(legend) // ncols) for legend, ncols in legends)
    panel_height = sum((1 + wrapped) * (title + height) for title, height in zip(titles, heights, strict=True))
    total_height = panel_height + CAPTION_HEIGHT * len(rows) + LEGEND_LINE_HEIGHT * legend_lines + 0.15
    figure = Figure(figsize=(WIDTH, total_height))
    top = 0.0
    for row, title_height, height in zip(rows, titles, heights, strict=True):
        for index, (pixels, title) in enumerate(zip(row.panels, columns, strict=True)):
            if index % per_line == 0:
                top += title_height + (height if index > 0 else 0.0)
            panel = axes_at(figure, index % per_line * (width + GAP), top, width, height)
            panel.imshow(pixels, interpolation="antialiased", aspect="auto")
            panel.axis("off")
            if title_height:
                panel.set_title(title, fontsize=13 if max(map(len, columns)) < 25 else 11, pad=5)
            _draw_boxes(panel, row.boxes)
        top += height
        figure.text(0.002, 1 - (top + GAP) / total_height, row.caption, fontsize=10.5, color="#444444", va="top")
        top += CAPTION_HEIGHT
    for legend, ncols in legends:
        # matplotlib fills legends column by column; reorder the entries so that they read row by row.
        entries = [legend[k] for column in range(ncols) for k in range(column, len(legend), ncols)]
        figure.legend(
            handles=legend_patches(entries),
            loc="upper left",
            bbox_to_anchor=(0, 1 - top / total_height),
            ncols=ncols,
            frameon=False,
            fontsize=11,
            columnspacing=1.4,
            borderpad=0.1,
            borderaxespad=0.2,
        )
        top += LEGEND_LINE_HEIGHT * -(-len(legend) // ncols)
    return figure


def legend_patches(legend: Legend) -> list[Patch]:
    """Return matplotlib handles for the entries of a legend."""
    return [
        Patch(facecolor=[value / 255 for value in color], edgecolor="#888888", linewidth=0.5, label=name)  # type: ignore[arg-type]
        for name, color in legend
    ]


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes at a position in inches, measured from the upper left corner of the figure."""
    figure_width, figure_height = figure.get_size_inches()
    bottom = figure_height - top - height
    return figure.add_axes((left / figure_width, bottom / figure_height, width / figure_width, height / figure_height))


def _draw_boxes(panel: Axes, boxes: Sequence[Box]) -> None:
    """Draw boxes in white on black, visible on every color, with a small inset that keeps adjacent boxes apart."""
    inset = 0.006 * (panel.get_xlim()[1] - panel.get_xlim()[0])
    for box in boxes:
        corner = box.left - 0.5 + inset, box.top - 0.5 + inset
        width, height = box.right - box.left - 2 * inset, box.bottom - box.top - 2 * inset
        frame = Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=1.4)
        frame.set_path_effects([Stroke(linewidth=3, foreground="black"), Normal()])
        panel.add_patch(frame)


def label_panel(
    image: Tensor, labels: Tensor, palette: Sequence[Color], background: int | None = None
) -> NDArray[np.uint8]:
    """Return an image (3, H, W) blended with the colors of labels or predictions (H, W), as a panel (H, W, 3)."""
    return overlay(image.permute(1, 2, 0).numpy(), labels.numpy(), palette, OPACITY, background)
