"""Report of a grid: the finished cells next to the paper's numbers, as table, Markdown, JSON and figure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from caaseg.analysis.paired import CONFIDENCE, Difference, paired_difference
from caaseg.config import Recipe
from caaseg.data.catalogue import find
from caaseg.files import atomic_write
from caaseg.reports.figures import COLORS, MARKERS, save
from caaseg.reproduce.grid import EvaluationProtocol, Grid
from caaseg.reproduce.runner import read_cell, score_of
from caaseg.reproduce.tables import TABLES, Row

METHOD = (
    "Ours: mean over seeds ± sample standard deviation, in %. Differences are in points, paired over the seeds that "
    "both rows have, with confidence intervals (Student's t). The intervals are corrected for their number "
    f"(Bonferroni): with m intervals in a table, the confidence level of each is 1 - {1 - CONFIDENCE:.2f} / m. A "
    "difference counts as shown only if its interval does not contain zero. The probability that a table shows any "
    f"difference that does not exist is at most {1 - CONFIDENCE:.0%}, if rows and seeds were chosen before their "
    "results were known. Differences per class are a table of their own. One seed gives no interval."
)

MAX_CLASSES = 60
"""With more classes, differences per class are in the JSON file only."""

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
    """Difference to the baseline, -1 to 1; its interval is corrected for all comparisons of the report."""
    cost: Cost | None
    relative_time: float | None
    """Training time per image relative to the baseline on the same hardware."""
    parameters: int | None
    source: str | None = None
    """Where the paper's number is published, if not in the paper."""
    note: str | None = None
    """Detail of the row that the paper does not state."""
    seeds: tuple[int, ...] = ()
    """The seeds of `scores`."""
    classes: Mapping[str, Difference] = field(default_factory=dict)
    """Difference to the baseline in the IoU of each class; intervals are corrected for all comparisons of classes."""

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
    def comparisons(self) -> int:
        """Number of intervals of mean IoU; each of these intervals is corrected for it."""
        return sum(row.difference is not None and row.difference.low is not None for row in self.rows)

    @property
    def class_comparisons(self) -> int:
        """Number of intervals of classes; each of these intervals is corrected for it."""
        return sum(found.low is not None for row in self.rows for found in row.classes.values())

    @property
    def class_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.classes))

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
        rows=_report_rows(grid, records),
        quoted=tuple((f"{find(q.dataset).title}: {q.method}", q.mean, q.source) for q in quoted),
        same_data=grid.recipe is None or datasets == paper_datasets,
        missing=sum(not grid.file(cell).is_file() for cell in grid.cells),
        publisher=table.publisher,
    )


Pairs = tuple[list[float], list[float]]
"""Scores of a row and of its baseline for the same seeds."""


def _report_rows(grid: Grid, records: Mapping[tuple[str, int], Record | None]) -> tuple[ReportRow, ...]:
    """Return one report row per row and scoring protocol, with intervals corrected for the number of comparisons."""
    rows = {row.name: row for row in grid.rows}
    keys = [(row, protocol) for row in grid.rows for protocol in _protocols(grid, row)]
    scores = {(row.name, protocol): _scores(grid, row, protocol, records) for row, protocol in keys}
    means, classes = dict[Any, Pairs](), dict[Any, dict[str, Pairs]]()
    for row, protocol in keys:
        ours, theirs = scores[row.name, protocol], scores.get((row.baseline or "", protocol), {})
        # Rows with the same recipe share their runs: comparing a run with itself would show nothing.
        common = [s for s in ours if s in theirs and grid.by_row[row.name, s] != grid.by_row[str(row.baseline), s]]
        means[row.name, protocol] = (
            [ours[seed]["mean_iou"] for seed in common],
            [theirs[seed]["mean_iou"] for seed in common],
        )
        names = dict.fromkeys(name for seed in common for name in ours[seed]["iou"])
        paired = {name: [(ours[s]["iou"].get(name), theirs[s]["iou"].get(name)) for s in common] for name in names}
        known = {name: [(a, b) for a, b in pairs if a is not None and b is not None] for name, pairs in paired.items()}
        classes[row.name, protocol] = {
            name: ([a for a, _ in pairs], [b for _, b in pairs]) for name, pairs in known.items() if pairs
        }
    number = _intervals(means.values())
    class_number = _intervals(pairs for found in classes.values() for pairs in found.values())

    def report_row(row: Row, protocol: EvaluationProtocol) -> ReportRow:
        ours, seeds = scores[row.name, protocol], grid.seeds_of(row)
        baseline = rows.get(row.baseline or "")
        of_row = [records[row.name, seed] for seed in seeds]
        of_baseline = [] if baseline is None else [records[baseline.name, seed] for seed in grid.seeds_of(baseline)]
        cost = Cost.of(of_row)
        paper = row.paper.get("multi" if protocol.flip else "single")
        by_class: dict[str, Difference] = {}
        for name, pairs in classes[row.name, protocol].items():
            difference = paired_difference(*pairs, comparisons=class_number)
            assert difference is not None
            by_class[name] = difference
        return ReportRow(
            row=row.name,
            label=row.title(own_recipe=grid.recipe is None),
            protocol=protocol.label,
            scores=tuple(ours[seed]["mean_iou"] if seed in ours else None for seed in seeds),
            paper=None if paper is None else paper.mean,
            paper_std=None if paper is None else paper.std,
            baseline=None if baseline is None else baseline.name,
            difference=paired_difference(*means[row.name, protocol], comparisons=number),
            cost=cost,
            relative_time=_relative_time(cost, Cost.of(of_baseline)),
            parameters=next((record["parameters"] for record in of_row if record), None),
            source=row.source,
            note=row.note,
            seeds=tuple(seeds),
            classes=by_class,
        )

    return tuple(report_row(row, protocol) for row, protocol in keys)


def _protocols(grid: Grid, row: Row) -> tuple[EvaluationProtocol, ...]:
    return grid.by_row[row.name, grid.seeds_of(row)[0]].protocols


def _scores(
    grid: Grid, row: Row, protocol: EvaluationProtocol, records: Mapping[tuple[str, int], Record | None]
) -> dict[int, dict[str, Any]]:
    """Return the scores of the finished cells of a row by seed."""
    found: dict[int, dict[str, Any]] = {}
    for seed in grid.seeds_of(row):
        record = records[row.name, seed]
        score = None if record is None else score_of(record, protocol)
        if score is not None:
            found[seed] = score
    return found


def _intervals(pairs: Iterable[Pairs]) -> int:
    """Return the number of comparisons with an interval, at least 1."""
    return max(sum(len(ours) > 1 for ours, _ in pairs), 1)


def _relative_time(cost: Cost | None, reference: Cost | None) -> float | None:
    if cost is None or reference is None or cost.hardware != reference.hardware:
        return None
    ours, theirs = cost.images_per_second, reference.images_per_second
    return None if ours is None or theirs is None else theirs / ours


def _notes(grid: Grid, datasets: set[str], paper_datasets: set[str]) -> Iterator[str]:
    """Yield notes about data, recipe and shared rows."""
    recipes = [cell.recipe for cell in grid.cells]
    budgets = {
        f": {_length(recipe)} with batch size {recipe.batch_size}, starting from "
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
        shared.setdefault(grid.by_row[row.name, grid.seeds_of(row)[0]].row, []).append(row.name)
    for names in shared.values():
        if len(names) > 1:
            yield f"These rows are the same network here, trained once per seed: {', '.join(names)}."


def _length(recipe: Recipe) -> str:
    return f"{recipe.steps} steps" if recipe.epochs is None else f"{recipe.epochs:g} epochs"


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
    if 0 < len(report.class_names) <= MAX_CLASSES:
        save(draw_classes(report), path.with_name(f"{grid.name}-classes.png"))
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
    """Return sentences about the differences: per protocol those shown, those not shown, and rows not compared."""
    lines = []
    for protocol in report.protocols:
        found: dict[str, list[str]] = {"Shown": [], "No difference shown": [], "Not compared": []}
        for row in report.rows:
            if row.baseline is None or row.protocol != protocol:
                continue
            pairs = 0 if row.difference is None else row.difference.pairs
            seeds = f"{pairs} {'seed' if pairs == 1 else 'seeds'}"
            if row.difference is None or row.difference.low is None:
                found["Not compared"].append(f"{row.row} against {row.baseline} ({seeds}, no interval)")
                continue
            claim = row.difference.claim
            numbers = f"({100 * row.difference.mean:+.2f} points, interval {_interval(row.difference)}, {seeds})"
            if claim == "no difference shown":
                found["No difference shown"].append(f"{row.row} against {row.baseline} {numbers}")
            else:
                found["Shown"].append(f"{row.row} is {claim} than {row.baseline} {numbers}")
        if not found["Shown"] and found["No difference shown"]:
            found["Shown"] = ["nothing"]
        title = protocol[0].upper() + protocol[1:]
        lines += [f"{title}. {kind}: {'; '.join(names)}." for kind, names in found.items() if names]
    if report.class_comparisons:
        claims = [
            f"{row.row} is {difference.claim} than {row.baseline} for class {name} ({row.protocol})"
            for row in report.rows
            for name, difference in row.classes.items()
            if difference.claim != "no difference shown"
        ]
        lines.append(f"Classes. Shown: {'; '.join(claims) if claims else 'nothing'}.")
    if report.comparisons:
        lines.append(
            f"Intervals of mean IoU are corrected for {_count(report.comparisons)}, intervals of classes for "
            f"{_count(report.class_comparisons)}."
        )
    return lines


def _count(comparisons: int) -> str:
    return f"{comparisons} comparison{'' if comparisons == 1 else 's'}"


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
    return [*missing, *notes, METHOD, *protocol, times, *cited, *report.notes]


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
    table = _markdown_table(rows)
    notes = "\n".join(f"- {line}" for line in report_lines(report))
    shown = "\n".join(f"- {line}" for line in shown_lines(report))
    shown = f"## Shown differences\n\n{shown}\n\n" if shown else ""
    return f"# {report.title}\n\n{table}\n\n{shown}{_class_tables(report)}## Notes\n\n{notes}\n"


def _class_tables(report: GridReport) -> str:
    """Return the differences per class in Markdown, one table per protocol."""
    names = report.class_names
    if not 0 < len(names) <= MAX_CLASSES:
        return ""
    text = "## Differences of IoU per class\n\n"
    for protocol in report.protocols:
        rows = [["row", *names], [":---", *["---:"] * len(names)]]
        for row in report.rows:
            if row.protocol == protocol and row.classes:
                found = [row.classes.get(name) for name in names]
                rows.append([f"{row.row} to {row.baseline}", *("" if d is None else _class_cell(d) for d in found)])
        text += (
            f"{protocol[0].upper() + protocol[1:]}, in points; bold: shown differences.\n\n{_markdown_table(rows)}\n\n"
        )
    return text


def _class_cell(difference: Difference) -> str:
    text = f"{100 * difference.mean:+.2f} {_interval(difference)}"
    return text if difference.claim == "no difference shown" else f"**{text}**"


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def as_json(report: GridReport) -> dict[str, Any]:
    """Return the report as plain values. Scores are exact; speeds are included only if measured on a GPU."""
    lines = []
    for row in report.rows:
        record = asdict(row)
        record |= {"mean": row.mean, "std": row.std}
        if row.difference is not None:
            record["difference"] = {**row.difference._asdict(), "shown": row.difference.claim}
        record["classes"] = {name: {**d._asdict(), "shown": d.claim} for name, d in row.classes.items()}
        if row.cost is not None and not report.on_gpu:
            del record["cost"]["images_per_second"]
        lines.append(record)
    return {
        "title": report.title,
        "shown": shown_lines(report),
        "comparisons": report.comparisons,
        "class_comparisons": report.class_comparisons,
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


def draw_classes(report: GridReport) -> Figure:
    """Draw the differences of IoU per class to the baseline, one panel per row.

    Filled markers are shown differences. Intervals much wider than the differences extend beyond the panel.
    """
    names = report.class_names
    labels = {row.row: f"{row.label}\nagainst {row.baseline}" for row in report.rows if row.classes}
    columns = min(4, len(labels))
    lines = -(-len(labels) // columns)
    size = (2.2 + 2.7 * columns, 1.2 + lines * (0.7 + 0.26 * len(names)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    panels = dict(zip(labels, axes.flat, strict=False))
    largest = max(abs(difference.mean) for row in report.rows for difference in row.classes.values())
    limit = max(300 * largest, 0.1)
    colors = {protocol: COLORS[k % len(COLORS)] for k, protocol in enumerate(report.protocols)}
    markers = {protocol: MARKERS[k % len(MARKERS)] for k, protocol in enumerate(report.protocols)}
    for row in (row for row in report.rows if row.classes):
        color, panel = colors[row.protocol], panels[row.row]
        offset = report.protocols.index(row.protocol) - (len(report.protocols) - 1) / 2
        for name, difference in row.classes.items():
            y = names.index(name) + 0.5 * offset / len(report.protocols)
            if difference.low is not None and difference.high is not None:
                panel.plot([100 * difference.low, 100 * difference.high], [y, y], color=color, linewidth=1.2, alpha=0.6)
            face = "white" if difference.claim == "no difference shown" else color
            marker = markers[row.protocol]
            panel.plot(100 * difference.mean, y, marker, color=color, markerfacecolor=face, markersize=5)
    for panel in axes.flat[len(labels) :]:
        panel.set_visible(False)
    for name, panel in panels.items():
        panel.set_title(labels[name], fontsize=9)
        panel.set_xlabel("difference of IoU, points", fontsize=8)
        panel.axvline(0, color="#555555", linewidth=0.8)
        panel.set_xlim(-limit, limit)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.grid(alpha=0.25, axis="x")
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8, labelbottom=True)
        panel.spines[["top", "right"]].set_visible(False)
    blank = axes.flat[0]
    handles = [
        blank.plot([], [], color=color, marker=markers[name], markerfacecolor="white", label=name)[0]
        for name, color in colors.items()
    ]
    handles.append(blank.plot([], [], "o", color="#555555", label="filled: difference shown")[0])
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(
        f"{report.title}: differences per class, intervals corrected for {_count(report.class_comparisons)}",
        fontsize=10,
    )
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
    mean = 100 * row.difference.mean
    return f"to {row.baseline}: {mean:+.2f}", _interval(row.difference), row.difference.claim


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return "no interval"
    return f"[{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"


def _cost_headings(report: GridReport) -> list[str]:
    return ["images/s", "GB"] if report.on_gpu else ["time"]


def _cost_cells(row: ReportRow, on_gpu: bool) -> list[str]:
    if not on_gpu:
        return ["" if row.relative_time is None else f"{row.relative_time:.2f}"]
    speed, peak = (None, None) if row.cost is None else (row.cost.images_per_second, row.cost.peak_gpu_bytes)
    return ["" if speed is None else f"{speed:.0f}", "" if peak is None else f"{peak / 1e9:.2f}"]
