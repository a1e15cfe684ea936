"""A table of the paper as a grid of runs: every row trained with every seed, each such cell kept when it is finished.

The grid's folder holds cells/ROW-seedK.json, all that is known of a finished cell, and runs/ROW-seedK/, its run. A cell
whose file is there is not run again, with or without its run: so files of cells can be kept, carried elsewhere and gone
on from. Whatever is killed goes on: a run from its newest checkpoint, the grid from its first open cell.
"""

import gc
import json
import math
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from caaseg.config import Recipe
from caaseg.data.catalogue import find
from caaseg.data.loaders import worthwhile
from caaseg.evaluation.evaluate import evaluate
from caaseg.evaluation.inference import Precision, Predictor
from caaseg.evaluation.paired import paired_difference
from caaseg.files import written_whole
from caaseg.models import load_model
from caaseg.recipe_files import differences, load_recipe, plain_recipe, read_recipe
from caaseg.reports.draw import save
from caaseg.reports.grids import Cost, GridReport, Line, as_json, draw_grid, markdown
from caaseg.studies.paper_tables import SCALES, TABLES, Protocol, Row
from caaseg.studies.training import REPORT
from caaseg.studies.training import write_report as write_run_report
from caaseg.training import checkpoints
from caaseg.training.journal import FILE as JOURNAL
from caaseg.training.journal import read_lines
from caaseg.training.runs import MAY_CHANGE, Progress, open_split, train

BASES = {
    "pascal_context": "pascal_context/caa_resnet101_s16",
    "coco_stuff_10k": "coco_stuff_10k/caa_aux_resnet101_s8",
    "coco_stuff_164k": "coco_stuff_164k/caa_efficientnet_b5_s8",
    "cityscapes": "cityscapes/caa_aux_resnet101_s8",
    "camvid": "camvid/caa_resnet50",
    "folder": "folder/caa_resnet18",
    "scenes": "scenes/caa_resnet18",
}
"""The recipe of a grid on a dataset, where none is given."""

MARGIN = 1.1  # of the time that a cell is thought to take


class StopSignalError(BaseException):
    """A signal asked to stop. What is not finished can be gone on with."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Manner(NamedTuple):
    """How a model is scored."""

    split: str
    scales: tuple[float, ...]
    flip: bool

    @property
    def label(self) -> str:
        return "several scales, mirrored" if self.flip else "single scale"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row trained with a seed."""

    row: str
    seed: int
    recipe: Recipe
    manners: tuple[Manner, ...]
    """How it is scored: the final model, after the last step."""

    @property
    def name(self) -> str:
        return f"{self.row}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is to be run and shown."""

    name: str
    folder: Path
    rows: tuple[Row, ...]
    seeds: int
    cells: tuple[Cell, ...]
    """All rows of the first seed, then those of the next: what is stopped early leaves whole comparisons."""
    by_row: Mapping[tuple[str, int], Cell]
    """Of a row and a seed. Rows that the recipe makes the same network share cells."""
    recipe: str | None
    """What all rows are trained by; None where each is by its own."""
    words: tuple[str, ...]
    """What was overridden in it."""

    def file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"

    def run(self, cell: Cell) -> Path:
        return self.folder / "runs" / cell.name


class Ended(NamedTuple):
    """How far a grid is."""

    left: int  # cells not finished
    signal: int | None  # that stopped it
    out_of_time: bool


def plan(
    name: str,
    folder: Path,
    *,
    dataset: str | None = None,
    recipe: str | None = None,
    root: Path | None = None,
    rows: Sequence[str] | None = None,
    seeds: int = 1,
    split: str | None = None,
    multi_scale: bool = False,
    scales: tuple[float, ...] = SCALES,
    overrides: Sequence[str] = (),
) -> Grid:
    """What a table asks for, checked; nothing is run yet.

    Args:
        name: a table that is trained for.
        folder: of the grid.
        dataset: train on it instead of the paper's, by one recipe for all rows.
        recipe: that recipe; the one of BASES unless given.
        root: folder of the dataset.
        rows: names of the rows to run; all unless given.
        seeds: seeds 0 to seeds - 1.
        split: what final models are scored on; the recipe's val_split unless given.
        multi_scale: score at several scales and mirrored too, where the paper's table does not.
        scales: these.
        overrides: values of the recipe as words of a command line; they beat what the rows say.
    """
    table = TABLES[name]
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; expected 1 or more")
    for word in overrides:
        for option, instead in (("--seed", "--seeds N, which runs seeds 0 to N - 1"), ("--data.dataset", "--dataset")):
            if word.partition("=")[0] == option:
                raise ValueError(f"{option} is what the grid itself decides; expected {instead}")
    words = (*overrides, *(() if root is None else ("--data.root", str(root))))
    known = [row for row in table.rows if recipe is None and row.dataset == dataset and dataset is not None]
    own = recipe is None and (dataset is None or bool(known))
    base = None if own else recipe or _base(name, dataset)
    if own and any(row.recipe is None for row in table.rows):
        raise ValueError(f"{name} is no table of the paper and has no data of its own; give --dataset or --recipe")
    recipes = {row.name: _recipe(row, base, words) for row in known or table.rows}
    if base is not None and dataset is not None:
        found = next(iter(recipes.values())).data.dataset
        if found != dataset:
            raise ValueError(f"--dataset is {dataset}, but recipe {base} is for {found}; leave out one of them")
    several = multi_scale or any("multi" in row.paper for row in table.rows)
    chosen = _chosen(rows, known or table.rows)
    # Of rows that the recipe makes the same network the first gives its name, whichever of them are run.
    names = {row: next(other for other in recipes if recipes[other] == recipes[row]) for row in recipes}

    def cell(row: Row, seed: int) -> Cell:
        seeded = replace(recipes[row.name], seed=seed)
        where = split or seeded.data.val_split
        manners = (Manner(where, (1.0,), False), *([Manner(where, scales, True)] if several else []))
        return Cell(row=names[row.name], seed=seed, recipe=seeded, manners=manners)

    by_row = {(row.name, seed): cell(row, seed) for seed in range(seeds) for row in chosen}
    return Grid(
        name=name,
        folder=folder,
        rows=tuple(chosen),
        seeds=seeds,
        cells=tuple({cell.name: cell for cell in by_row.values()}.values()),
        by_row=by_row,
        recipe=base,
        words=tuple(overrides),
    )


def run(
    grid: Grid,
    *,
    device: torch.device,
    origin: Mapping[str, Any],
    keep_runs: bool = True,
    limit_s: float | None = None,
    told: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Ended:
    """Run the cells that are not finished, as far as the time goes.

    Args:
        grid: what `plan` gave.
        device: where.
        origin: what each cell's file says of hardware, versions, command and commit.
        keep_runs: keep the runs of finished cells, their weights and checkpoints.
        limit_s: start no cell that would not be finished in so many seconds from now, judged by the finished ones.
        told: a sentence a cell.
        progress: told how far the run of a cell is.
    """
    started = time.monotonic()
    say = told or (lambda sentence: None)
    open_cells = [cell for cell in grid.cells if not _is_finished(grid, cell)]  # files of others are refused first
    ended = Ended(len(open_cells), None, False)

    def tidy(cell: Cell) -> None:
        if not keep_runs:
            shutil.rmtree(grid.run(cell), ignore_errors=True)

    try:
        with _signals_raised():
            for cell in grid.cells:
                if cell not in open_cells:
                    tidy(cell)  # one may have been finished, and the command killed before it came to this
            for cell in open_cells:
                needed = _seconds_needed(grid, cell, origin)
                if limit_s is not None and needed is not None:
                    left_s = limit_s - (time.monotonic() - started)
                    if needed > left_s:
                        say(f"{cell.name} takes about {needed:.0f} s, and {max(0, left_s):.0f} s are left")
                        return ended._replace(out_of_time=True)
                say(f"{cell.name}: {ended.left} of {len(grid.cells)} cells are left")
                _finish(grid, cell, device, origin, progress)
                tidy(cell)
                ended = ended._replace(left=ended.left - 1)
    except StopSignalError as stop:
        return ended._replace(signal=stop.number)
    return ended


def report(grid: Grid) -> GridReport:
    """What the finished cells say, beside the paper's numbers."""
    records = {key: _read(grid.file(cell)) for key, cell in grid.by_row.items()}
    lines = tuple(line for row in grid.rows for line in _lines(grid, row, records))
    table, cells = TABLES[grid.name], grid.cells
    datasets = {cell.recipe.data.dataset for cell in cells}
    papers = {row.dataset for row in grid.rows if row.dataset is not None}
    # Others' numbers say something beside ours on the same data alone.
    beside = [q for q in table.quoted if grid.recipe is None and q.dataset in datasets]
    quoted = [(f"{find(q.dataset).title}: {q.method}", q.mean) for q in beside]
    return GridReport(
        title=table.title,
        notes=(*_notes(grid, datasets, papers), *table.notes),
        lines=lines,
        quoted=tuple(quoted),
        same_data=grid.recipe is None or datasets == papers,
        missing=sum(not grid.file(cell).is_file() for cell in cells),
    )


def write_report(grid: Grid, origin: Mapping[str, Any]) -> GridReport:
    """Write the report beside the cells, as Markdown, JSON and a figure, each whole."""
    made = report(grid)
    place = grid.folder / grid.name
    with written_whole(place.with_suffix(".md")) as aside:
        aside.write_text(markdown(made))
    _write_json(place.with_suffix(".json"), {**origin, "table": grid.name, **as_json(made)})
    save(draw_grid(made), place.with_suffix(".png"))
    return made


def _base(name: str, dataset: str | None) -> str:
    assert dataset is not None
    find(dataset)
    if dataset not in BASES:
        raise ValueError(f"no recipe is shipped for {dataset}; give one by --recipe, a name or a YAML file")
    return BASES[dataset]


def _recipe(row: Row, base: str | None, words: Sequence[str]) -> Recipe:
    if base is None:
        assert row.recipe is not None
        return load_recipe(row.recipe, words)
    changed = [f"--model.{key}={json.dumps(value) if value is None else value}" for key, value in row.model.items()]
    return load_recipe(base, [*changed, *words])


def _chosen(names: Sequence[str] | None, rows: Sequence[Row]) -> list[Row]:
    if names is None:
        return list(rows)
    for name in names:
        if name not in {row.name for row in rows}:
            raise ValueError(f"--rows has {name!r}; expected any of {', '.join(row.name for row in rows)}")
    return [row for row in rows if row.name in names]


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into StopSignalError, so that what is open is closed; a training takes them its way."""
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # processes that read for this one inherit it
            raise StopSignalError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_finished(grid: Grid, cell: Cell) -> bool:
    """Whether a cell's file is there and has every score; refused where it is of another recipe."""
    path = grid.file(cell)
    record = _read(path)
    if record is None:
        return False
    written = read_recipe(record["recipe"], path)
    changed = {key: two for key, two in differences(written, cell.recipe).items() if key not in MAY_CHANGE}
    if changed:
        listed = ", ".join(f"{key} was {old} and is {new}" for key, (old, new) in changed.items())
        raise ValueError(
            f"{path}: the cell was trained otherwise: {listed}; give the same values, another --out, or remove the "
            "file and its run to train it again"
        )
    unscored = [manner for manner in cell.manners if _score(record, manner) is None]
    if unscored and not (grid.run(cell) / "model").is_dir():
        scored = "; ".join(f"{s['split']} at {s['scales']}" for s in record["scores"])
        wanted = f"{unscored[0].split} at {list(unscored[0].scales)}"
        raise ValueError(
            f"{path}: scored on {scored}, but not on {wanted}, and its model is gone from {grid.run(cell)}; ask for "
            "what it has, or remove the file to train it again"
        )
    return not unscored


def _finish(
    grid: Grid,
    cell: Cell,
    device: torch.device,
    origin: Mapping[str, Any],
    progress: Callable[[Progress], None] | None,
) -> None:
    """Train a cell, or go on with it, score it and write its file."""
    record = _read(grid.file(cell)) or {**_train(grid, cell, device, progress), **origin, "scores": []}
    model = load_model(grid.run(cell)).to(device)
    record["parameters"] = sum(weight.numel() for weight in model.parameters())
    for manner in cell.manners:
        if _score(record, manner) is None:
            record["scores"].append(_scored(model, cell.recipe, manner))
    _write_json(grid.file(cell), record)


def _train(grid: Grid, cell: Cell, device: torch.device, progress: Callable[[Progress], None] | None) -> dict[str, Any]:
    folder, recipe = grid.run(cell), cell.recipe
    on_gpu = device.type == "cuda"
    gc.collect()  # of the cell before: lightning's parts hold each other
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begun = checkpoints.newest_step(folder)
    started = time.perf_counter()
    result = train(recipe, folder, resume="auto", device="cuda" if on_gpu else "cpu", progress=progress)
    seconds = time.perf_counter() - started
    if not result.finished:
        raise StopSignalError(result.stopped_by or signal.SIGTERM)
    if not (folder / REPORT).exists():
        write_run_report(recipe, folder, device)
    lines = read_lines(folder / JOURNAL)
    speeds = [line["images_per_second"] for line in lines if "loss" in line][1:]  # the first has the warming up in it
    return {
        "row": cell.row,
        "seed": cell.seed,
        "recipe": plain_recipe(recipe),
        "val_mean_iou": [line["val_mean_iou"] for line in lines if "val_mean_iou" in line][-1],
        "best_val_mean_iou": result.best_mean_iou,
        "best_step": result.best_step,
        "training_seconds": None if begun else seconds,  # of a run that was stopped in between nobody knows
        "images_per_second": statistics.median(speeds) if speeds else None,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if on_gpu and begun < recipe.steps else None,
    }


def _scored(model: torch.nn.Module, recipe: Recipe, manner: Manner) -> dict[str, Any]:
    data = open_split(recipe, manner.split)
    precision: Precision = "bf16" if recipe.precision == "bf16" else "32"
    predictor = Predictor(model, scales=manner.scales, flip=manner.flip, precision=precision)
    scores = evaluate(predictor, data, workers=worthwhile(recipe.data.workers, len(data)))
    if not scores.confusion.any():
        raise ValueError(f"no pixel of split {manner.split} of {recipe.data.dataset} is labelled; give another --split")
    iou = {name: None if math.isnan(value) else value for name, value in zip(scores.classes, scores.iou, strict=True)}
    return {
        "split": manner.split,
        "scales": list(manner.scales),
        "flip": manner.flip,
        "precision": precision,
        "images": scores.images,
        "mean_iou": scores.mean_iou,
        "pixel_accuracy": scores.pixel_accuracy,
        "mean_accuracy": scores.mean_accuracy,
        "iou": iou,
        "seconds": scores.seconds,
    }


def _score(record: Mapping[str, Any], manner: Manner) -> dict[str, Any] | None:
    for score in record["scores"]:
        if Manner(score["split"], tuple(score["scales"]), score["flip"]) == manner:
            found: dict[str, Any] = score
            return found
    return None


def _seconds_needed(grid: Grid, cell: Cell, origin: Mapping[str, Any]) -> float | None:
    """How long the rest of a cell will take, by the longest of those finished on such a device: its row's, or any."""
    taken: dict[str, float] = {}
    for other in grid.cells:
        record = _read(grid.file(other))
        if record is not None and record["hardware"]["device"] == origin["hardware"]["device"]:
            training, speed = record["training_seconds"], record["images_per_second"]
            if training is None and speed is not None:
                training = other.recipe.steps * other.recipe.batch_size / speed
            whole = (training or 0) + sum(score["seconds"] for score in record["scores"])
            taken[other.row] = max(whole, taken.get(other.row, 0))
    if not taken:
        return None
    share = 1 - checkpoints.newest_step(grid.run(cell)) / cell.recipe.steps
    return MARGIN * taken.get(cell.row, max(taken.values())) * max(share, 0)


def _lines(grid: Grid, row: Row, records: Mapping[tuple[str, int], dict[str, Any] | None]) -> Iterator[Line]:
    """A line a way of scoring."""
    seeds = range(grid.seeds)
    baseline = next((other for other in grid.rows if other.name == row.baseline), None)
    for manner in grid.by_row[row.name, 0].manners:
        protocol: Protocol = "multi" if manner.flip else "single"

        def scores(of: Row, manner: Manner = manner) -> list[float | None]:
            found = [records[of.name, seed] for seed in seeds]
            scored = [None if record is None else _score(record, manner) for record in found]
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
            paper_deviation=None if number is None else number.deviation,
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
    speeds = [record["images_per_second"] for record in known if record["images_per_second"] is not None]
    return Cost(
        images_per_second=statistics.median(speeds) if speeds else None,
        peak_gpu_bytes=max(peaks, default=None),
        hardware=tuple(sorted({record["hardware"]["device"] for record in known})),
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


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if not {"recipe", "scores", "hardware"} <= content.keys():
            raise ValueError("keys are missing")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not the file of a cell ({error}); remove it to run the cell again") from error
    found: dict[str, Any] = content
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with written_whole(path) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n")
