"""What the finished cells of a grid say, beside the paper's numbers."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from caaseg.analysis.paired import paired_difference
from caaseg.data.catalogue import find
from caaseg.files import atomic_write
from caaseg.reports.figures import save
from caaseg.reports.grids import Cost, GridReport, Line, as_json, draw_grid, markdown
from caaseg.reproduce.grid import Grid, Manner
from caaseg.reproduce.runner import read_cell, score_of
from caaseg.reproduce.tables import TABLES, Protocol, Row


def grid_report(grid: Grid) -> GridReport:
    """What the finished cells say, beside the paper's numbers."""
    records = {key: read_cell(grid.file(cell)) for key, cell in grid.by_row.items()}
    lines = tuple(line for row in grid.rows for line in _lines(grid, row, records))
    table, cells = TABLES[grid.name], grid.cells
    datasets = {cell.recipe.data.dataset for cell in cells}
    papers = {row.dataset for row in grid.rows if row.dataset is not None}
    # Others' numbers say something beside ours on the same data alone.
    beside = [q for q in table.quoted if grid.recipe is None and q.dataset in datasets]
    quoted = [(f"{find(q.dataset).title}: {q.method}", q.mean) for q in beside]
    return GridReport(
        title=table.title,
        notes=(*_notes(grid, datasets, papers), *_of_speeds(records.values()), *table.notes),
        lines=lines,
        quoted=tuple(quoted),
        same_data=grid.recipe is None or datasets == papers,
        missing=sum(not grid.file(cell).is_file() for cell in cells),
    )


def write_grid_report(grid: Grid, origin: Mapping[str, Any]) -> GridReport:
    """Write the report beside the cells, as Markdown, JSON and a figure, each whole."""
    made = grid_report(grid)
    place = grid.folder / grid.name
    with atomic_write(place.with_suffix(".md")) as aside:
        aside.write_text(markdown(made))
    with atomic_write(place.with_suffix(".json")) as aside:
        aside.write_text(json.dumps({**origin, "table": grid.name, **as_json(made)}, indent=1) + "\n")
    save(draw_grid(made), place.with_suffix(".png"))
    return made


def _lines(grid: Grid, row: Row, records: Mapping[tuple[str, int], dict[str, Any] | None]) -> Iterator[Line]:
    """A line a way of scoring."""
    seeds = range(grid.seeds)
    baseline = next((other for other in grid.rows if other.name == row.baseline), None)
    for manner in grid.by_row[row.name, 0].manners:
        protocol: Protocol = "multi" if manner.flip else "single"

        def scores(of: Row, manner: Manner = manner) -> list[float | None]:
            found = [records[of.name, seed] for seed in seeds]
            scored = [None if record is None else score_of(record, manner) for record in found]
            return [None if score is None else score["mean_iou"] for score in scored]

        ours = scores(row)
        theirs = [] if baseline is None else scores(baseline)
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
        cost = _cost([records[row.name, seed] for seed in seeds])
        reference = None if baseline is None else _cost([records[baseline.name, seed] for seed in seeds])
        number = row.paper.get(protocol)
        found = next((record for seed in seeds if (record := records[row.name, seed])), None)
        yield Line(
            row=row.name,
            label=row.label,
            manner=manner.label,
            scores=tuple(ours),
            paper=None if number is None else number.mean,
            paper_deviation=None if number is None else number.std,
            baseline=None if baseline is None else baseline.name,
            difference=paired_difference([a for a, _ in pairs], [b for _, b in pairs]),
            cost=cost,
            relative_time=_relative_time(cost, reference),
            parameters=None if found is None else found["parameters"],
        )


def _relative_time(cost: Cost | None, reference: Cost | None) -> float | None:
    """Where both ran on the same hardware, one time over the other."""
    if cost is None or reference is None or cost.hardware != reference.hardware:
        return None
    ours, theirs = cost.images_per_second, reference.images_per_second
    return None if ours is None or theirs is None else theirs / ours


def _cost(records: Sequence[dict[str, Any] | None]) -> Cost | None:
    known = [record for record in records if record is not None]
    if not known:
        return None
    peaks = [record["peak_gpu_bytes"] for record in known if record["peak_gpu_bytes"] is not None]
    # Beside others a run is slower, by as much as they happen to do.
    alone = [record for record in known if record.get("alone", True)]
    speeds = [record["images_per_second"] for record in alone if record["images_per_second"] is not None]
    return Cost(
        images_per_second=statistics.median(speeds) if speeds else None,
        peak_gpu_bytes=max(peaks, default=None),
        hardware=tuple(sorted({record["hardware"]["device"] for record in known})),
    )


def _of_speeds(records: Iterable[dict[str, Any] | None]) -> Iterator[str]:
    if not all(record is None or record.get("alone", True) for record in records):
        yield (
            "Cells that were trained beside others on one machine count in no speed; `caaseg benchmark model` measures "
            "heads one by one."
        )


def _notes(grid: Grid, datasets: set[str], papers: set[str]) -> Iterator[str]:
    budgets = {
        f": {recipe.steps} steps of {recipe.batch_size} images, "
        f"{'pretrained' if recipe.model.pretrained else 'random'} weights at the start"
        for recipe in (cell.recipe for cell in grid.cells)
    }
    learned = sorted({cell.recipe.data.train_split for cell in grid.cells})
    splits = sorted({manner.split for cell in grid.cells for manner in cell.manners})
    on = ", ".join(f"{find(name).title} ({name})" for name in sorted(datasets))
    by = f"recipe {grid.recipe}" if grid.recipe else "the recipe of each row"
    changed = f", with {' '.join(grid.words)}" if grid.words else ""
    yield (
        f"Ours are of {on}, split {' and '.join(splits)}, scored after the last step; trained on "
        f"{' and '.join(learned)} by {by}{changed}{budgets.pop() if len(budgets) == 1 else ''}."
    )
    if grid.recipe is not None and papers and datasets != papers:
        yield (
            "Ours and the paper's numbers are of different data, and by different recipes: compare how rows differ, "
            "not the numbers."
        )
    shared: dict[str, list[str]] = {}
    for row in grid.rows:
        shared.setdefault(grid.by_row[row.name, 0].row, []).append(row.name)
    for names in shared.values():
        if len(names) > 1:
            yield f"These rows are one network here, trained once a seed: {', '.join(names)}."
