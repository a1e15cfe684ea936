"""Draws factorisation.png: python docs/figures/factorisation.py [FILE]. A test compares the image with this script."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

INK, MAP, STACK = "#22303c", "#dbe6f1", "#f3d9d4"
COLUMN, ROW = "#e08e1b", "#15918a"  # gates of image rows and of image columns
SIDE = 1.0


def square(axes: Axes, x: float, y: float, text: str, color: str = MAP) -> None:
    """Draw a map of H x W pixels with its channels."""
    axes.add_patch(Rectangle((x, y), SIDE, SIDE, facecolor=color, edgecolor=INK, linewidth=1))
    axes.text(x + SIDE / 2, y + SIDE / 2, text, ha="center", va="center", fontsize=12, color=INK)


def stack(axes: Axes, x: float, y: float, text: str) -> None:
    """A stack of maps: one per position of a line."""
    for k in reversed(range(9)):
        axes.add_patch(
            Rectangle((x + 0.09 * k, y + 0.09 * k), SIDE, SIDE, facecolor=STACK, edgecolor=INK, linewidth=0.7)
        )
    axes.text(x + SIDE / 2, y + SIDE / 2, text, ha="center", va="center", fontsize=12, color=INK)


def column_gate(axes: Axes, x: float, y: float) -> None:
    """One vector per image row: a bar as high as the map."""
    axes.add_patch(Rectangle((x, y), 0.16, SIDE, facecolor=COLUMN, edgecolor=INK, linewidth=1))


def row_gate(axes: Axes, x: float, y: float) -> None:
    """One vector per image column: a bar as wide as the map."""
    axes.add_patch(Rectangle((x, y), SIDE, 0.16, facecolor=ROW, edgecolor=INK, linewidth=1))


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", *, bend: float = 0.0
) -> None:
    """Draw an arrow with a label above it."""
    shape = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=INK, linewidth=1, connectionstyle=shape)
    )
    axes.text((start[0] + end[0]) / 2, start[1] + 0.12, text, ha="center", fontsize=9, color=INK)


def draw_definition(axes: Axes) -> None:
    """Draw the definition: the terms of both sums are built and gated."""
    axes.text(0, 2.35, "Definition: every term of both sums is built, gated, then summed", fontsize=12, weight="bold")
    middle = 0.5
    square(axes, 0, 0, "$V$")
    arrow(axes, (1.05, middle), (1.85, middle), r"$\times A_{col}$")
    stack(axes, 1.9, 0, r"$\alpha$")
    axes.text(2.75, -0.3, r"$H \cdot HWC$ numbers", ha="center", fontsize=9, color=INK)
    arrow(axes, (3.75, middle), (4.4, middle), "gate")
    column_gate(axes, 4.5, 0)
    axes.text(4.58, -0.3, "$g_{col}$", ha="center", fontsize=11, color=COLUMN)
    arrow(axes, (4.75, middle), (5.4, middle), r"$\Sigma_m$")
    square(axes, 5.45, 0, "$x_1$")
    arrow(axes, (6.5, middle), (7.3, middle), r"$\times A_{row}$")
    stack(axes, 7.35, 0, r"$\beta$")
    axes.text(8.2, -0.3, r"$W \cdot HWC$ numbers", ha="center", fontsize=9, color=INK)
    arrow(axes, (9.2, middle), (9.85, middle), "gate")
    row_gate(axes, 9.95, middle - 0.08)
    axes.text(10.45, -0.3 + 0.4, "$g_{row}$", ha="center", fontsize=11, color=ROW)
    arrow(axes, (11.0, middle), (11.65, middle), r"$\Sigma_n$")
    square(axes, 11.7, 0, "out")


def draw_factorised(axes: Axes) -> None:
    """Draw the factorised form: plain axial attention and two gates."""
    axes.text(0, 2.35, "Factorised: plain axial attention, times two small gates", fontsize=12, weight="bold")
    middle = 0.5
    square(axes, 0, 0, "$V$")
    arrow(axes, (1.05, middle), (2.95, middle), "column attention")
    square(axes, 3.0, 0, "$y$")
    arrow(axes, (4.05, middle), (5.4, middle), "row attention")
    square(axes, 5.45, 0, "$r$")
    arrow(axes, (6.5, middle), (7.7, middle), r"$\times$")
    column_gate(axes, 7.8, 0)
    axes.text(7.88, -0.3, "$g_{col}$", ha="center", fontsize=11, color=COLUMN)
    arrow(axes, (8.05, middle), (9.85, middle), r"$\times$")
    row_gate(axes, 9.95, middle - 0.08)
    axes.text(10.45, -0.3 + 0.4, "$g_{row}$", ha="center", fontsize=11, color=ROW)
    arrow(axes, (11.0, middle), (11.65, middle))
    square(axes, 11.7, 0, "out")
    arrow(axes, (3.5, 1.05), (7.88, 1.08), bend=-0.13)
    axes.text(5.6, 1.62, r"pool over $j$, MLP, sigmoid", ha="center", fontsize=9, color=INK)
    arrow(axes, (8.6, 0.55), (10.45, 0.65), bend=-0.75)
    axes.text(9.5, 1.62, r"pool over $i$, MLP, sigmoid", ha="center", fontsize=9, color=INK)


def draw_reason(axes: Axes) -> None:
    """Draw why the column gate can be applied later: row attention stays in an image row, which has one gate."""
    axes.text(
        -1.6,
        3.3,
        "Why the gate can be applied last: row attention mixes pixels of one image row,",
        fontsize=12,
        weight="bold",
    )
    axes.text(-1.6, 2.95, "and all pixels of a row have the same column gate", fontsize=12, weight="bold")
    rows, columns, cell, shown = 5, 9, 0.5, 2
    for i in range(rows):
        y = (rows - 1 - i) * cell
        for j in range(columns):
            axes.add_patch(
                Rectangle((j * cell, y), cell, cell, facecolor=MAP if i == shown else "white", edgecolor="#9fb0c0")
            )
        axes.add_patch(
            Rectangle((-0.45, y), 0.2, cell, facecolor=COLUMN, alpha=1 if i == shown else 0.35, edgecolor="white")
        )
    at = (rows - 1 - shown) * cell + cell / 2
    for j in (0, 2, 8):
        bend = 0.35 if j < 5 else -0.35
        arrow(axes, ((j + 0.5) * cell, at), (5.5 * cell, at), bend=-bend)
    axes.plot(5.5 * cell, at, "o", color=INK, markersize=6)
    axes.text(-0.55, at, "$g_{col}[i]$", ha="right", va="center", fontsize=11, color=COLUMN)
    lines = (
        r"$\Sigma_n\; A_{row}[i;\, j, n]\;\; g_{col}[i]\;\; y[i, n]$",
        r"$=\;\; g_{col}[i]\;\; \Sigma_n\; A_{row}[i;\, j, n]\;\; y[i, n]$",
        r"$=\;\; g_{col}[i]\;\; r[i, j]$",
    )
    for k, line in enumerate(lines):
        axes.text(5.3, 1.85 - 0.6 * k, line, va="center", fontsize=13, color=INK)


def draw(path: Path) -> None:
    """Draw the three parts below each other."""
    figure, panels = plt.subplots(3, 1, figsize=(9.6, 7.6), height_ratios=(1, 1, 1.2))
    for axes, panel, limits in zip(
        panels, (draw_definition, draw_factorised, draw_reason), ((-0.45, 2.6), (-0.45, 2.6), (-0.1, 3.55)), strict=True
    ):
        axes.set_xlim(-0.15, 12.85)
        axes.set_ylim(*limits)
        axes.set_aspect("equal")
        axes.set_anchor("W")
        axes.axis("off")
        panel(axes)
    panels[2].set_xlim(-1.75, 11.25)
    figure.tight_layout(pad=0.6)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
