"""Figures."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from caaseg.benchmarks.attention import Outcome
from caaseg.benchmarks.model import ModelCost
from caaseg.files import atomic_write

COLORS = ("#0b6e99", "#d1495b", "#3a7d44", "#8a5fbf", "#c77d0a")


def draw_groups(outcomes: Sequence[Outcome]) -> Figure:
    """Time and memory against number of groups, the factorised form as a line: the paper's appendix figure, and ours.

    A row of panels a dtype, a color a size; group 1 is full vectorization, and "loop" is its own mark at the right.
    """
    panels: tuple[tuple[str, Callable[[Outcome], float | None]], ...] = (
        ("forward, ms", lambda o: o.forward_ms),
        ("forward + backward, ms", lambda o: o.training_ms),
        ("training memory, MB", lambda o: None if o.training_peak_bytes is None else o.training_peak_bytes / 1e6),
    )
    dtypes = list(dict.fromkeys(o.case.dtype for o in outcomes))
    sizes = list(dict.fromkeys((o.case.batch, o.case.height, o.case.width) for o in outcomes))
    figure = Figure(figsize=(12, 0.9 + 3.1 * len(dtypes)), layout="constrained")
    axes = figure.subplots(len(dtypes), len(panels), squeeze=False, sharex=True)
    for row, dtype in zip(axes, dtypes, strict=True):
        for panel, (title, value) in zip(row, panels, strict=True):
            for color, size in zip(COLORS * len(sizes), sizes, strict=False):
                here = [
                    o for o in outcomes if o.case.dtype == dtype and (o.case.batch, o.case.height, o.case.width) == size
                ]
                _draw_size(panel, here, value, color)
            panel.set_title(f"{title} ({dtype})", fontsize=10)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.25, which="both", linewidth=0.5)
            panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[-1]:
        panel.set_xlabel("number of groups")
    handles = [
        axes[0][0].plot([], [], color=color, linewidth=3, label=f"{n} x {h} x {w}")[0]
        for color, (n, h, w) in zip(COLORS * len(sizes), sizes, strict=False)
    ]
    styles = (
        {"marker": "o", "linestyle": "-", "label": "grouped (the paper's way)"},
        {"marker": "x", "linestyle": "", "label": "row by row"},
        {"marker": "", "linestyle": "--", "label": "factorised (ours)"},
        {"marker": "", "linestyle": "-.", "label": "fused (ours)"},
        {"marker": "", "linestyle": ":", "label": "plain axial attention"},
    )
    handles += [axes[0][0].plot([], [], color="#555555", **style)[0] for style in styles]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_size(panel: Axes, here: list[Outcome], value: Callable[[Outcome], float | None], color: str) -> None:
    grouped: dict[int, float] = {}
    for outcome in here:
        case, height = outcome.case, value(outcome)
        if height is None:  # memory ran out
            continue
        if case.groups is not None:
            grouped[case.groups] = height
        elif case.implementation == "loop":
            panel.plot(max(case.height, case.width), height, color=color, marker="x")
        else:
            style = {"factorised": "--", "fused": "-."}.get(case.implementation, ":")
            panel.axhline(height, color=color, linestyle=style, linewidth=1.4)
    panel.plot(list(grouped), list(grouped.values()), color=color, marker="o", markersize=4, linewidth=1.4)


def draw_growth(costs: Sequence[ModelCost], batch: int) -> Figure:
    """Time and memory of an image against its size, a line a model; a line ends where memory did."""
    panels: tuple[tuple[str, Callable[[ModelCost], float | None]], ...] = (
        ("inference, ms an image", lambda c: _inverse(c.inference_images_per_second)),
        ("training, ms an image", lambda c: _inverse(c.training_images_per_second)),
        ("training memory, GB", lambda c: None if c.training_peak_bytes is None else c.training_peak_bytes / 1e9),
    )
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    models = list(dict.fromkeys(cost.model for cost in costs))
    for panel, (title, value) in zip(axes, panels, strict=True):
        for color, model in zip(COLORS * len(models), models, strict=False):
            points = [(cost.size[1], value(cost)) for cost in costs if cost.model == model]
            shown = [(side, height) for side, height in points if height is not None]
            panel.plot(
                [side for side, _ in shown],
                [height for _, height in shown],
                color=color,
                marker="o",
                markersize=4,
                label=model,
            )
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        sides = sorted({cost.size[1] for cost in costs})
        panel.set_xticks(sides, [str(side) for side in sides])
        panel.minorticks_off()
        panel.set_xlabel(f"pixels a side, {batch} at once")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a size is doubled, so ten times is too coarse
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
        panel.grid(alpha=0.25, which="both", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _inverse(per_second: float | None) -> float | None:
    return None if per_second is None else 1000 / per_second


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the ending of the name chooses the format."""
    with atomic_write(path) as aside:
        figure.savefig(aside, dpi=110)
