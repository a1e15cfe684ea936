"""Training curves as inline SVG. The page's style sheet sets their colors, for light and dark mode."""

import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from caaseg.reports.figures import COLORS

INK, RULE = "#1c2024", "#e2e4e8"
STYLED = {INK: "var(--ink)", RULE: "var(--rule)"} | {
    color: f"var(--line-{k})" for k, color in enumerate(COLORS, start=1)
}
MAX_POINTS = 300  # per line
SIZE = (4.6, 2.5)  # inches


class Line(NamedTuple):
    """A named series of values over training steps."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


def draw_lines(lines: Sequence[Line], *, from_zero: bool = False) -> Figure:
    """Draw lines over training steps. Long lines are averaged in bins; several lines are labeled with their names."""
    figure = Figure(figsize=SIZE, layout="constrained")
    panel = figure.subplots()
    for color, line in zip(COLORS, lines, strict=False):
        steps, values = (_binned(numbers) for numbers in (line.steps, line.values))
        marker = "o" if len(steps) < 30 else ""
        panel.plot(steps, values, color=color, linewidth=1.6, marker=marker, markersize=3.2)
        if len(lines) > 1 and len(steps):
            panel.annotate(
                line.name,
                (steps[-1], values[-1]),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=color,
                weight="bold",
                annotation_clip=False,
            )
    if from_zero:
        panel.set_ylim(bottom=0)
    panel.set_xlabel("step", color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(5))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    panel.tick_params(color=RULE, labelcolor=INK, labelsize=9)
    panel.grid(color=RULE, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["bottom", "left"]].set_color(RULE)
    return figure


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as inline SVG that fills its container; `name` makes its element ids unique on the page."""
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" aria-label="{name}" \1>', svg)
    svg = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{name}-", svg)
    svg = svg.replace("xlink:href", "href")
    for color, variable in STYLED.items():
        svg = svg.replace(color, variable)
    return re.sub(r"\n\s*", "\n", svg)


def _binned(numbers: Sequence[float]) -> list[float]:
    bins = min(len(numbers), MAX_POINTS)
    return [float(part.mean()) for part in np.array_split(np.asarray(numbers, float), bins)] if bins else []
