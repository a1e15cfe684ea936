"""Report of a grid: the finished cells next to the paper's numbers, as table, Markdown, JSON and figure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from caaseg.analysis.paired import CONFIDENCE, Difference, paired_difference
from caaseg.data.catalogue import find
from caaseg.files import atomic_write
from caaseg.reports.figures import COLORS, save
from caaseg.reproduce.grid import EvaluationProtocol, Grid
from caaseg.reproduce.runner import read_cell, score_of
from caaseg.reproduce.tables import TABLES, Row

METHOD = (
    "Ours: mean over seeds ± sample standard deviation, in %. Differences are paired by seed, in points, with their "
    f"{CONFIDENCE:.0%} confidence interval (Student's t). No difference is claimed if the interval contains zero, or "
    f"with one seed. Of {1 / (1 - CONFIDENCE):.0f} rows equal to their baselines, one is expected to show a difference "
    "by chance."
)

Record = dict[str, Any]
"""The content of a cell file."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Training cost of a row over its seeds."""

    images_per_second: float | None
    """Median; None if the runs were too short or not alone on the machine."""
    peak_gpu_bytes: int | None
    """Maximum; None on a CPU."""
    hardware: tuple[str, ...]
    """All devices that were used."""

    @classmethod
    def of(cls, records: Sequence[Record | None]) -> "Cost | None":
        """Summarize the cells of a row, one per seed; None if none is finished."""
        finished = [record for record in records if record is not None]
        if not finished:
            return None
        peaks = [record["peak_gpu_bytes"] for record in finished if record["peak_gpu_bytes"] is not None]
        # Runs that share the machine with others are slower.
        alone = [record["images_per_second"] for record in finished if record.get("alone", True)]
        speeds = [speed for speed in alone if speed is not None]
        return cls(
            images_per_second=median(speeds) if speeds else None,
            peak_gpu_bytes=max(peaks, default=None),
            hardware=tuple(sorted({record["hardware"]["device"] for record in finished})),
        )


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """A row of the table, scored with one protocol."""

    row: str
    label: str
    protocol: str
    """Single scale, or multi-scale with flips."""
    scores: tuple[float | None, ...]
    """Mean IoU of each seed, 0 to 1; None if not finished."""
    paper: float | None
    """The paper's number, in %."""
    paper_std: float | None
    baseline: str | None
    """Name of the row that this row is compared with."""
    difference: Difference | None
    """Difference to the baseline, -1 to 1."""
    cost: Cost | None
    relative_time: float | None
    """Training time per image relative to the baseline on the same hardware."""
    parameters: int | None
    source: str | None = None
    """Where the paper's number is published, if not in the paper."""
    note: str | None = None
    """Detail of the row that the paper does not state."""

    @property
    def finished(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.finished) if self.finished else None

    @property
    def std(self) -> float | None:
        return stdev(self.finished) if len(self.finished) > 1 else None


@dataclass(frozen=True, kw_only=True)
class GridReport:
    """All rows of a table with its notes."""

    title: str
    notes: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    quoted: tuple[tuple[str, float, str], ...]
    """Other methods with their published numbers and sources; not trained here."""
    same_data: bool
    """Whether our numbers and the paper's are on the same dataset."""
    missing: int
    """Number of unfinished cells."""
    publisher: str = "paper"
    """Heading of the published numbers."""

    @property
    def on_gpu(self) -> bool:
        costs = [row.cost for row in self.rows if row.cost is not None]
        return bool(costs) and all(cost.peak_gpu_bytes is not None for cost in costs)

    @property
    def protocols(self) -> list[str]:
        return list(dict.fromkeys(row.protocol for row in self.rows))

    @property
    def row_notes(self) -> list[str]:
        """The notes of single rows, in their order."""
        return list(dict.fromkeys(row.note for row in self.rows if row.note is not None))

    def mark(self, row: ReportRow) -> str:
        """Return the number of a row's note, such as " [1]", or an empty text."""
        return "" if row.note is None else f" [{1 + self.row_notes.index(row.note)}]"


def grid_report(grid: Grid) -> GridReport:
    """Collect the finished cells of a grid with the paper's numbers."""
    records = {key: read_cell(grid.file(cell)) for key, cell in grid.by_row.items()}
    table = TABLES[grid.name]
    datasets = {cell.recipe.data.dataset for cell in grid.cells}
    paper_datasets = {row.dataset for row in grid.rows if row.dataset is not None}
    # Numbers of other methods are comparable on the same data only.
    quoted = [q for q in table.quoted if grid.recipe is None and q.dataset in datasets]
    notes = list(_notes(grid, datasets, paper_datasets))
    if not all(record is None or record.get("alone", True) for record in records.values()):
        notes.append(
            "Cells that were trained at the same time as others on one machine are excluded from the speeds; "
            "`caaseg benchmark model` measures heads one at a time."
        )
    return GridReport(
        title=table.title,
        notes=(*notes, *table.notes),
        rows=tuple(report_row for row in grid.rows for report_row in _report_rows(grid, row, records)),
        quoted=tuple((f"{find(q.dataset).title}: {q.method}", q.mean, q.source) for q in quoted),
        same_data=grid.recipe is None or datasets == paper_datasets,
        missing=sum(not grid.file(cell).is_file() for cell in grid.cells),
        publisher=table.publisher,
    )


def _report_rows(grid: Grid, row: Row, records: Mapping[tuple[str, int], Record | None]) -> Iterator[ReportRow]:
    """Yield one report row per scoring protocol."""

    def records_of(of: Row) -> list[Record | None]:
        return [records[of.name, seed] for seed in range(grid.seeds)]

    def scores(of: Row, protocol: EvaluationProtocol) -> list[float | None]:
        found = [None if record is None else score_of(record, protocol) for record in records_of(of)]
        return [None if score is None else score["mean_iou"] for score in found]

    baseline = next((other for other in grid.rows if other.name == row.baseline), None)
    cost = Cost.of(records_of(row))
    for protocol in grid.by_row[row.name, 0].protocols:
        ours = scores(row, protocol)
        theirs = [] if baseline is None else scores(baseline, protocol)
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
        paper = row.paper.get("multi" if protocol.flip else "single")
        yield ReportRow(
            row=row.name,
            label=row.title(own_recipe=grid.recipe is None),
            protocol=protocol.label,
            scores=tuple(ours),
            paper=None if paper is None else paper.mean,
            paper_std=None if paper is None else paper.std,
            baseline=None if baseline is None else baseline.name,
            difference=paired_difference([a for a, _ in pairs], [b for _, b in pairs]),
            cost=cost,
            relative_time=None if baseline is None else _relative_time(cost, Cost.of(records_of(baseline))),
            parameters=next((record["parameters"] for record in records_of(row) if record), None),
            source=row.source,
            note=row.note,
        )


def _relative_time(cost: Cost | None, reference: Cost | None) -> float | None:
    if cost is None or reference is None or cost.hardware != reference.hardware:
        return None
    ours, theirs = cost.images_per_second, reference.images_per_second
    return None if ours is None or theirs is None else theirs / ours


def _notes(grid: Grid, datasets: set[str], paper_datasets: set[str]) -> Iterator[str]:
    """Yield notes about data, recipe and shared rows."""
    recipes = [cell.recipe for cell in grid.cells]
    budgets = {
        f": {recipe.steps} steps with batch size {recipe.batch_size}, starting from "
        f"{'pretrained' if recipe.model.pretrained else 'random'} weights"
        for recipe in recipes
    }
    train_splits = " and ".join(sorted({recipe.data.train_split for recipe in recipes}))
    splits = " and ".join(sorted({protocol.split for cell in grid.cells for protocol in cell.protocols}))
    data = ", ".join(f"{find(name).title} ({name})" for name in sorted(datasets))
    by = f"recipe {grid.recipe}" if grid.recipe else "the recipe of each row"
    overrides = f", with {' '.join(grid.overrides)}" if grid.overrides else ""
    yield (
        f"Our numbers: {data}, split {splits}, evaluated after the last step; trained on {train_splits} with "
        f"{by}{overrides}{budgets.pop() if len(budgets) == 1 else ''}."
    )
    if grid.recipe is not None and paper_datasets and datasets != paper_datasets:
        yield (
            "Our numbers and the paper's are on different data and from different recipes: compare the differences "
            "between rows, not the numbers."
        )
    shared: dict[str, list[str]] = {}
    for row in grid.rows:
        shared.setdefault(grid.by_row[row.name, 0].row, []).append(row.name)
    for names in shared.values():
        if len(names) > 1:
            yield f"These rows are the same network here, trained once per seed: {', '.join(names)}."


def write_grid_report(grid: Grid, origin: Mapping[str, Any]) -> GridReport:
    """Write the report into the directory of the grid as Markdown, JSON and PNG."""
    report = grid_report(grid)
    path = grid.directory / grid.name
    with atomic_write(path.with_suffix(".md")) as temporary:
        temporary.write_text(markdown(report), encoding="utf-8")
    with atomic_write(path.with_suffix(".json")) as temporary:
        temporary.write_text(
            json.dumps({**origin, "table": grid.name, **as_json(report)}, indent=1) + "\n", encoding="utf-8"
        )
    save(draw_grid(report), path.with_suffix(".png"))
    return report


def grid_table(report: GridReport) -> Table:
    """Return the report as a narrow terminal table: rows by name, long cells in several lines."""
    table = Table(title=report.title, title_justify="left", show_lines=True)
    table.add_column("row", overflow="fold", min_width=12)
    for heading in ("ours", report.publisher, "difference", *_cost_headings(report)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        cells = (
            row.row + report.mark(row) + (f"\n{row.protocol}" if len(report.protocols) > 1 else ""),
            _ours(row).replace(" (", "\n("),
            _paper(row),
            "\n".join(_difference(row)),
            *_cost_cells(row, report.on_gpu),
        )
        table.add_row(*(Text(cell) for cell in cells))
    for method, number, source in report.quoted:
        table.add_row(Text(f"{method} ({source}, not run here)"), "", f"{number:.2f}")
    return table


def shown_lines(report: GridReport) -> list[str]:
    """Return which differences the finished cells show, and which they do not, each with its number of seeds."""
    shown, not_shown = [], []
    for row in report.rows:
        if row.baseline is None:
            continue
        name = f"{row.row}, {row.protocol}" if len(report.protocols) > 1 else row.row
        pairs, seeds = 0 if row.difference is None else row.difference.pairs, len(row.scores)
        finished = f"{pairs} of {seeds} seeds"
        if row.difference is not None and row.difference.claim != "no difference shown":
            shown.append(f"{name} is {row.difference.claim} than {row.baseline} ({finished})")
        else:
            reason = "" if pairs == 0 else ", no interval" if pairs == 1 else ", interval contains zero"
            not_shown.append(f"{name} against {row.baseline} ({finished}{reason})")
    lines = {"Shown": shown, "Not shown": not_shown}
    return [f"{title}: {'; '.join(found)}." for title, found in lines.items() if found]


def report_lines(report: GridReport) -> list[str]:
    """Return the sentences below the table."""
    missing = [f"{report.missing} cells are not finished; run the same command to resume."] if report.missing else []
    times = "time: training time per image relative to the baseline."
    if report.on_gpu:
        times = "images/s: median training speed; GB: peak GPU memory of training."
    protocol = [f"Protocol: {report.protocols[0]}."] if len(report.protocols) == 1 else []
    notes = [f"[{number}] {note}" for number, note in enumerate(report.row_notes, start=1)]
    sources = dict.fromkeys(f"{row.row} {row.source}" for row in report.rows if row.source is not None)
    cited = [f"Sources: {'; '.join(sources)}."] if sources else []
    return [*missing, *shown_lines(report), *notes, METHOD, *protocol, times, *cited, *report.notes]


def markdown(report: GridReport) -> str:
    """Return the report as Markdown."""
    headings = ["row", "ours", report.publisher, "difference", "interval", "shown", *_cost_headings(report)]
    rows = [headings, [":---", *["---:"] * (len(headings) - 1)]]
    for row in report.rows:
        label = f"{row.label}, {row.protocol}" if len(report.protocols) > 1 else row.label
        label += report.mark(row)
        rows.append([label, _ours(row), _paper(row), *_difference(row), *_cost_cells(row, report.on_gpu)])
    for method, number, source in report.quoted:
        quoted = [f"{method} ({source}, not run here)", "", f"{number:.2f}"]
        rows.append(quoted + [""] * (len(headings) - len(quoted)))
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    notes = "\n".join(f"- {line}" for line in report_lines(report))
    return f"# {report.title}\n\n{table}\n\n{notes}\n"


def as_json(report: GridReport) -> dict[str, Any]:
    """Return the report as plain values. Scores are exact; speeds are included only if measured on a GPU."""
    lines = []
    for row in report.rows:
        record = asdict(row)
        record |= {"mean": row.mean, "std": row.std}
        if row.difference is not None:
            record["difference"] = {**row.difference._asdict(), "shown": row.difference.claim}
        if row.cost is not None and not report.on_gpu:
            del record["cost"]["images_per_second"]
        lines.append(record)
    return {
        "title": report.title,
        "notes": report_lines(report),
        "missing_cells": report.missing,
        "lines": lines,
        "quoted": [{"method": method, "paper": number, "source": source} for method, number, source in report.quoted],
    }


def draw_grid(report: GridReport) -> Figure:
    """Draw means with standard deviations next to the paper's, on one scale if both are on the same data.

    The protocols of a row are drawn below each other.
    """
    has_paper = any(row.paper is not None for row in report.rows)
    labels = {row.row: row.label for row in report.rows}
    figure = Figure(figsize=(11 if has_paper else 8, 1.6 + 0.28 * len(report.rows)), layout="constrained")
    panels = figure.subplots(1, 1 + has_paper, sharey=True, sharex=report.same_data, squeeze=False)[0]
    colors = {protocol: COLORS[k % len(COLORS)] for k, protocol in enumerate(report.protocols)}
    for row in report.rows:
        color = colors[row.protocol]
        offset = report.protocols.index(row.protocol) - (len(report.protocols) - 1) / 2
        y = list(labels).index(row.row) + 0.4 * offset / len(report.protocols)
        if row.mean is not None:
            bar = None if row.std is None else 100 * row.std
            panels[0].errorbar(100 * row.mean, y, xerr=bar, color=color, marker="o", capsize=3)
            panels[0].plot(
                [100 * score for score in row.finished], [y] * len(row.finished), "|", color=color, alpha=0.6
            )
        if row.paper is not None:
            panels[1].errorbar(row.paper, y, xerr=row.paper_std, color=color, marker="D", capsize=3)
    panels[0].set_yticks(range(len(labels)), list(labels.values()), fontsize=9)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    theirs = report.publisher if report.same_data else f"{report.publisher}, other data"
    for panel, title in zip(panels, ("ours", theirs), strict=False):
        panel.set_title(title if has_paper else "", fontsize=10)
        panel.set_xlabel("mean IoU, %")
        panel.grid(alpha=0.25, axis="x")
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right"]].set_visible(False)
    if len(colors) > 1:
        handles = [
            panels[0].plot([], [], color=color, linewidth=3, label=protocol)[0] for protocol, color in colors.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(colors), frameon=False, fontsize=9)
    figure.suptitle(report.title, fontsize=11)
    return figure


def _ours(row: ReportRow) -> str:
    if row.mean is None:
        return "not finished"
    std = None if row.std is None else 100 * row.std
    number, seeds = len(row.finished), len(row.scores)
    return f"{_with_std(100 * row.mean, std)} (n {number}{f' of {seeds}' if number < seeds else ''})"


def _paper(row: ReportRow) -> str:
    return "" if row.paper is None else _with_std(row.paper, row.paper_std)


def _with_std(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _difference(row: ReportRow) -> tuple[str, str, str]:
    """Return the difference to the baseline, its interval, and the claim."""
    if row.baseline is None:
        return "", "", ""
    if row.difference is None:
        return f"to {row.baseline}:", "not finished", ""
    mean, low, high, _ = row.difference
    interval = "no interval" if low is None or high is None else f"[{100 * low:+.2f}, {100 * high:+.2f}]"
    return f"to {row.baseline}: {100 * mean:+.2f}", interval, row.difference.claim


def _cost_headings(report: GridReport) -> list[str]:
    return ["images/s", "GB"] if report.on_gpu else ["time"]


def _cost_cells(row: ReportRow, on_gpu: bool) -> list[str]:
    if not on_gpu:
        return ["" if row.relative_time is None else f"{row.relative_time:.2f}"]
    speed, peak = (None, None) if row.cost is None else (row.cost.images_per_second, row.cost.peak_gpu_bytes)
    return ["" if speed is None else f"{speed:.0f}", "" if peak is None else f"{peak / 1e9:.2f}"]
