"""A grid of runs, row by row beside the paper's numbers: on the terminal, as Markdown, as plain values, as a figure."""

from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from caaseg.analysis.paired import CONFIDENCE, Difference
from caaseg.reports.figures import COLORS

WHAT_IS_SHOWN = (
    "Ours: mean over seeds ± sample standard deviation, in %. Differences are paired over seeds, in points, with their "
    f"{CONFIDENCE:.0%} interval (Student's t); nothing is claimed where it holds zero, or where there is one seed. Of "
    f"{1 / (1 - CONFIDENCE):.0f} rows that do not differ from theirs, one is expected to look as if it did."
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What training a row took, the median over its seeds."""

    images_per_second: float | None
    """None where runs were too short to tell."""
    peak_gpu_bytes: int | None
    """None on a CPU."""
    hardware: tuple[str, ...]
    """Every device that its seeds ran on."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row, scored one way."""

    row: str
    label: str
    manner: str
    """Single scale, or several scales and mirrored images."""
    scores: tuple[float | None, ...]
    """Mean IoU of each seed, from 0 to 1; None where it was not run yet."""
    paper: float | None
    """In %, as the paper prints it."""
    paper_deviation: float | None
    baseline: str | None
    """The row that it is compared with."""
    difference: Difference | None
    """To the baseline, from -1 to 1."""
    cost: Cost | None
    relative_time: float | None
    """Training time for an image over the baseline's, where both ran on the same hardware."""
    parameters: int | None

    @property
    def run(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.run) if self.run else None

    @property
    def deviation(self) -> float | None:
        return stdev(self.run) if len(self.run) > 1 else None


@dataclass(frozen=True, kw_only=True)
class GridReport:
    """All that is said of a grid."""

    title: str
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    quoted: tuple[tuple[str, float], ...]
    """Methods of others that the paper prints numbers of: not trained here."""
    same_data: bool
    """Whether ours and the paper's numbers are of the same data."""
    missing: int
    """Cells that were not run yet."""

    @property
    def on_gpu(self) -> bool:
        costs = [line.cost for line in self.lines if line.cost is not None]
        return bool(costs) and all(cost.peak_gpu_bytes is not None for cost in costs)


def grid_table(report: GridReport) -> Table:
    """The report for a terminal, narrow: rows by their names, and each line in three where it needs them."""
    several = _manners(report)
    table = Table(title=report.title, title_justify="left", show_lines=True)
    table.add_column("row", overflow="fold", min_width=12)
    for heading in ("ours", "paper", "difference", *_cost_headings(report)):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in report.lines:
        words = (
            line.row + (f"\n{line.manner}" if several else ""),
            _ours(line).replace(" (", "\n("),
            _paper(line),
            "\n".join(_compared(line)),
            *_cost(line, report.on_gpu),
        )
        table.add_row(*(Text(word) for word in words))
    for method, number in report.quoted:
        table.add_row(Text(f"{method} (quoted by the paper, not run here)"), "", f"{number:.2f}")
    return table


def sentences(report: GridReport) -> list[str]:
    """What is to be read with the table."""
    missing = [f"{report.missing} cells were not run yet; the same command goes on."] if report.missing else []
    times = "Time: of training, for an image, over the baseline's."
    if report.on_gpu:
        times = "images/s: in training, the median; GB: most memory of the GPU that training took."
    manners = {line.manner for line in report.lines}
    scored = [f"Scored at a {manner}." for manner in manners if len(manners) == 1]
    return [*missing, WHAT_IS_SHOWN, *scored, times, *report.notes]


def markdown(report: GridReport) -> str:
    """The report as a page."""
    several = _manners(report)
    headings = ["row", "ours", "paper", "difference", "interval", "shown", *_cost_headings(report)]
    rows = [headings, [":---", *["---:"] * (len(headings) - 1)]]
    for line in report.lines:
        label = f"{line.label}, {line.manner}" if several else line.label
        rows.append([label, _ours(line), _paper(line), *_compared(line), *_cost(line, report.on_gpu)])
    for method, number in report.quoted:
        quoted = [f"{method} (quoted by the paper, not run here)", "", f"{number:.2f}"]
        rows.append(quoted + [""] * (len(headings) - len(quoted)))
    table = "\n".join("| " + " | ".join(word.replace("|", "\\|") for word in row) + " |" for row in rows)
    said = "\n".join(f"- {sentence}" for sentence in sentences(report))
    return f"# {report.title}\n\n{table}\n\n{said}\n"


def as_json(report: GridReport) -> dict[str, Any]:
    """Plain values; scores and differences exact, times in seconds only where a GPU took them."""
    lines = []
    for line in report.lines:
        record = asdict(line)
        difference = line.difference
        record["difference"] = None if difference is None else {**difference._asdict(), "shown": difference.claim}
        record |= {"mean": line.mean, "deviation": line.deviation}
        if record["cost"] is not None and not report.on_gpu:
            del record["cost"]["images_per_second"]
        lines.append(record)
    quoted = [{"method": method, "paper": number} for method, number in report.quoted]
    return {
        "title": report.title,
        "notes": sentences(report),
        "missing_cells": report.missing,
        "lines": lines,
        "quoted": quoted,
    }


def draw_grid(report: GridReport) -> Figure:
    """Ours, mean and deviation, and the paper's at its side; on one scale where both are of the same data."""
    of_paper = any(line.paper is not None for line in report.lines)
    height = 1.6 + 0.34 * len(report.lines)
    figure = Figure(figsize=(11 if of_paper else 8, height), layout="constrained")
    panels = figure.subplots(1, 1 + of_paper, sharey=True, sharex=report.same_data, squeeze=False)[0]
    manners = list(dict.fromkeys(line.manner for line in report.lines))
    for place, line in enumerate(report.lines):
        color = COLORS[manners.index(line.manner) % len(COLORS)]
        if line.mean is not None:
            bar = None if line.deviation is None else 100 * line.deviation
            panels[0].errorbar(100 * line.mean, place, xerr=bar, color=color, marker="o", capsize=3)
            panels[0].plot([100 * score for score in line.run], [place] * len(line.run), "|", color=color, alpha=0.6)
        if line.paper is not None:
            panels[1].errorbar(line.paper, place, xerr=line.paper_deviation, color=color, marker="D", capsize=3)
    panels[0].set_yticks(range(len(report.lines)), [line.label for line in report.lines], fontsize=8)
    panels[0].set_ylim(len(report.lines) - 0.5, -0.5)
    for panel, title in zip(
        panels, ("ours", "the paper" if report.same_data else "the paper, other data"), strict=False
    ):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("mean IoU, %")
        panel.grid(alpha=0.25, axis="x")
        panel.spines[["top", "right"]].set_visible(False)
    if len(manners) > 1:
        handles = [
            panels[0].plot([], [], color=COLORS[k % len(COLORS)], linewidth=3, label=manner)[0]
            for k, manner in enumerate(manners)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(manners), frameon=False, fontsize=9)
    figure.suptitle(report.title, fontsize=11)
    return figure


def _manners(report: GridReport) -> bool:
    return len({line.manner for line in report.lines}) > 1


def _ours(line: Line) -> str:
    if line.mean is None:
        return "not run yet"
    deviation = None if line.deviation is None else 100 * line.deviation
    number, asked = len(line.run), len(line.scores)
    return f"{_with_deviation(100 * line.mean, deviation)} (n {number}{f' of {asked}' if number < asked else ''})"


def _paper(line: Line) -> str:
    return "" if line.paper is None else _with_deviation(line.paper, line.paper_deviation)


def _with_deviation(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _compared(line: Line) -> tuple[str, str, str]:
    """The difference to the baseline, its interval, and what that shows."""
    if line.baseline is None:
        return "", "", ""
    if line.difference is None:
        return f"to {line.baseline}:", "not run yet", ""
    mean, low, high, _ = line.difference
    interval = "no interval" if low is None or high is None else f"[{100 * low:+.2f}, {100 * high:+.2f}]"
    return f"to {line.baseline}: {100 * mean:+.2f}", interval, line.difference.claim


def _cost_headings(report: GridReport) -> list[str]:
    return ["images/s", "GB"] if report.on_gpu else ["time"]


def _cost(line: Line, on_gpu: bool) -> list[str]:
    if not on_gpu:
        return ["" if line.relative_time is None else f"{line.relative_time:.2f}"]
    speed, peak = (None, None) if line.cost is None else (line.cost.images_per_second, line.cost.peak_gpu_bytes)
    return ["" if speed is None else f"{speed:.0f}", "" if peak is None else f"{peak / 1e9:.2f}"]
