"""Figures of the benchmarks, and `save`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from caaseg.benchmarks.attention import Measurement
from caaseg.benchmarks.model import ModelCost
from caaseg.files import atomic_write
from caaseg.models.heads import HEADS, head_class

COLORS = ("#0b6e99", "#d1495b", "#3a7d44", "#8a5fbf", "#c77d0a")
LINES = ("-", "--", ":", "-.")  # different, so that lines on top of each other stay visible
MARKERS = ("o", "s", "^", "D", "v")
IMPLEMENTATIONS = {"grouped": "grouped (the paper's Algorithm 1)"}


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix of the path selects the format."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)


def draw_groups(measurements: Sequence[Measurement]) -> Figure:
    """Draw time and memory against the number of groups, as in the paper's appendix, with our implementations as lines.

    One row of panels per dtype, one color per size. One group is full vectorization; "loop" is a cross at the right.
    """
    panels: tuple[tuple[str, Callable[[Measurement], float | None]], ...] = (
        ("forward, ms", lambda m: m.forward_ms),
        ("forward + backward, ms", lambda m: m.training_ms),
        ("training memory, MB", lambda m: None if m.training_peak_bytes is None else m.training_peak_bytes / 1e6),
    )
    dtypes = list(dict.fromkeys(m.case.dtype for m in measurements))
    sizes = list(dict.fromkeys(m.case.workload[:3] for m in measurements))
    figure = Figure(figsize=(12, 0.9 + 3.1 * len(dtypes)), layout="constrained")
    axes = figure.subplots(len(dtypes), len(panels), squeeze=False, sharex=True)
    for row, dtype in zip(axes, dtypes, strict=True):
        for panel, (title, value) in zip(row, panels, strict=True):
            for color, size in zip(COLORS * len(sizes), sizes, strict=False):
                _draw_size(panel, [m for m in measurements if m.case.workload == (*size, dtype)], value, color)
            _style(panel, f"{title} ({dtype})")
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
    for panel in axes[-1]:
        panel.set_xlabel("number of groups")
    handles = [
        axes[0][0].plot([], [], color=color, linewidth=3, label=f"{n} x {h} x {w}")[0]
        for color, (n, h, w) in zip(COLORS * len(sizes), sizes, strict=False)
    ]
    styles = (
        {"marker": "o", "linestyle": "-", "label": "grouped (the paper's implementation)"},
        {"marker": "x", "linestyle": "", "label": "row by row"},
        {"marker": "", "linestyle": "--", "label": "factorised (ours)"},
        {"marker": "", "linestyle": "-.", "label": "fused (ours)"},
        {"marker": "", "linestyle": ":", "label": "plain axial attention"},
    )
    handles += [axes[0][0].plot([], [], color="#555555", **style)[0] for style in styles]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _draw_size(
    panel: Axes, measurements: list[Measurement], value: Callable[[Measurement], float | None], color: str
) -> None:
    grouped: dict[int, float] = {}
    for measurement in measurements:
        case, height = measurement.case, value(measurement)
        if height is None:  # out of memory
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
    """Draw time and memory per image against image size, one line per model, without sizes that ran out of memory."""
    panels: tuple[tuple[str, Callable[[ModelCost], float | None]], ...] = (
        ("inference, ms per image", lambda c: _milliseconds(c.inference_images_per_second)),
        ("training, ms per image", lambda c: _milliseconds(c.training_images_per_second)),
        ("training memory, GB", lambda c: None if c.training_peak_bytes is None else c.training_peak_bytes / 1e9),
    )
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    models = list(dict.fromkeys(cost.model for cost in costs))
    sides = sorted({cost.size[1] for cost in costs})
    for panel, (title, value) in zip(axes, panels, strict=True):
        for k, model in enumerate(models):
            points = {c.size[1]: y for c in costs if c.model == model and (y := value(c)) is not None}
            color, line, marker, width = COLORS[k % len(COLORS)], LINES[k % len(LINES)], MARKERS[k % len(MARKERS)], 2.5
            style = {"color": color, "linestyle": line, "marker": marker, "linewidth": width - 0.5 * (k % len(LINES))}
            panel.plot(list(points), list(points.values()), markersize=5, label=model_label(model), **style)
        _style(panel, title)
        panel.set_xticks(sides, [str(side) for side in sides])
        panel.minorticks_off()
        panel.set_xlabel(f"image side in pixels, batch size {batch}")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


def model_label(name: str) -> str:
    """Return the legend label of a benchmarked model, such as caa:grouped:captured. It omits CUDA graph suffixes."""
    head, *options = name.split(":")
    if head not in HEADS:
        return name
    words = [IMPLEMENTATIONS.get(option, option) for option in options if option != "captured"]
    return ", ".join([head_class(head).title, *words])


def _style(panel: Axes, title: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    panel.grid(alpha=0.25, which="both", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


def _milliseconds(per_second: float | None) -> float | None:
    return None if per_second is None else 1000 / per_second
