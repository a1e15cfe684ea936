"""Report of a grid: the finished cells next to the paper's numbers. Other modules write it as text and figures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from caaseg.analysis.paired import Difference, paired_difference
from caaseg.config import Recipe
from caaseg.data.catalogue import find
from caaseg.reproduce.grid import Cell, EvaluationProtocol, Grid
from caaseg.reproduce.runner import read_cell, score_of
from caaseg.reproduce.tables import TABLES, Row

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
    shares_runs: bool = False
    """Whether its recipe equals that of the baseline, so that both rows are the same runs and are not compared."""
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
    """Number of cells that are not trained, or not scored with all protocols."""
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
        """Number of intervals of the IoU of single classes; each of these intervals is corrected for it."""
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
        missing=sum(not _is_scored(cell, read_cell(grid.file(cell))) for cell in grid.cells),
        publisher=table.publisher,
    )


def _is_scored(cell: Cell, record: Record | None) -> bool:
    return record is not None and all(score_of(record, protocol) is not None for protocol in cell.protocols)


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
            shares_runs=baseline is not None and _share_runs(grid, row, baseline),
            classes=by_class,
        )

    return tuple(report_row(row, protocol) for row, protocol in keys)


def _share_runs(grid: Grid, row: Row, other: Row) -> bool:
    """Return whether two rows are the same runs, because they have the same recipe."""
    common = set(grid.seeds_of(row)) & set(grid.seeds_of(other))
    return any(grid.by_row[row.name, seed] == grid.by_row[other.name, seed] for seed in common)


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
