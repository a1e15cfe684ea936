"""Running a grid: each cell trained, scored and kept when it is finished.

A cell whose file is there is not run again, with or without its run: so files of cells can be kept, carried elsewhere
and gone on from. Whatever is killed goes on: a run from its newest checkpoint, the grid from its first open cell.
Commands that run different rows may share a folder at the same time: each leaves a mark, by which a cell knows that it
was not alone, and that its speed says nothing.
"""

import gc
import json
import math
import os
import shutil
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from caaseg.api import REPORT, write_report
from caaseg.config import Recipe
from caaseg.data.loader import worthwhile
from caaseg.evaluation.evaluate import evaluate
from caaseg.files import atomic_write
from caaseg.models import load_model
from caaseg.models.predictor import Precision, Predictor
from caaseg.recipes import differences, read_recipe
from caaseg.reproduce.grid import Cell, Grid, Manner
from caaseg.training import checkpoints
from caaseg.training.conductor import Progress
from caaseg.training.metrics_log import FILE as JOURNAL
from caaseg.training.metrics_log import read_metrics
from caaseg.training.runs import MAY_CHANGE, train
from caaseg.training.setup import open_split

MARGIN = 1.1  # of the time that a cell is thought to take
MARK = f".running.{socket.gethostname()}."
"""How a file begins that says that a command is at work here; its process number follows."""


class StopSignalError(BaseException):
    """A signal asked to stop. What is not finished can be gone on with."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Ended(NamedTuple):
    """How far a grid is."""

    left: int  # cells not finished
    signal: int | None  # that stopped it
    out_of_time: bool


def run_grid(
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
        grid: what `plan_grid` gave.
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
        with _signals_raised(), _marked(grid):
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


def score_of(record: Mapping[str, Any], manner: Manner) -> dict[str, Any] | None:
    """What a cell was scored with in one manner; None where it was not."""
    for score in record["scores"]:
        if Manner(score["split"], tuple(score["scales"]), score["flip"]) == manner:
            found: dict[str, Any] = score
            return found
    return None


def read_cell(path: Path) -> dict[str, Any] | None:
    """What the file of a finished cell says; None where there is none."""
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


@contextmanager
def _marked(grid: Grid) -> Iterator[None]:
    """Let other commands in the same folder see this one."""
    mark, is_new = grid.folder / f"{MARK}{os.getpid()}", not grid.folder.exists()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # there is something in it: it failed no sooner
                grid.folder.rmdir()


def _is_alone(grid: Grid) -> bool:
    """Whether no other command runs cells of this folder on this machine; marks of killed ones do not count."""
    for mark in grid.folder.glob(f"{MARK}*"):
        number = int(mark.name.removeprefix(MARK))
        if number == os.getpid():
            continue
        try:
            os.kill(number, 0)  # asks whether it is there
            return False
        except ProcessLookupError:
            mark.unlink(missing_ok=True)
        except PermissionError:  # it is somebody else's
            return False
    return True


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
    record = read_cell(path)
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
    unscored = [manner for manner in cell.manners if score_of(record, manner) is None]
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
    record = read_cell(grid.file(cell)) or {**_train(grid, cell, device, progress), **origin, "scores": []}
    model = load_model(grid.run(cell)).to(device)
    record["parameters"] = sum(weight.numel() for weight in model.parameters())
    for manner in cell.manners:
        if score_of(record, manner) is None:
            record["scores"].append(_scored(model, cell.recipe, manner))
    with atomic_write(grid.file(cell)) as aside:
        aside.write_text(json.dumps(record, indent=1) + "\n")


def _train(grid: Grid, cell: Cell, device: torch.device, progress: Callable[[Progress], None] | None) -> dict[str, Any]:
    folder, recipe = grid.run(cell), cell.recipe
    on_gpu = device.type == "cuda"
    gc.collect()  # of the cell before: lightning's parts hold each other
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begun = checkpoints.newest_step(folder)
    alone = _is_alone(grid)
    started = time.perf_counter()
    result = train(recipe, folder, resume="auto", device="cuda" if on_gpu else "cpu", progress=progress)
    seconds = time.perf_counter() - started
    if not result.finished:
        raise StopSignalError(result.stopped_by or signal.SIGTERM)
    if not (folder / REPORT).exists():
        write_report(recipe, folder, device)
    lines = read_metrics(folder / JOURNAL)
    speeds = [line["images_per_second"] for line in lines if "loss" in line][1:]  # the first has the warming up in it
    return {
        "row": cell.row,
        "seed": cell.seed,
        "recipe": recipe.as_dict(),
        "val_mean_iou": [line["val_mean_iou"] for line in lines if "val_mean_iou" in line][-1],
        "best_val_mean_iou": result.best_mean_iou,
        "best_step": result.best_step,
        "alone": alone and _is_alone(grid),
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


def _seconds_needed(grid: Grid, cell: Cell, origin: Mapping[str, Any]) -> float | None:
    """How long the rest of a cell will take, by the longest of those finished on such a device: its row's, or any."""
    taken: dict[str, float] = {}
    for other in grid.cells:
        record = read_cell(grid.file(other))
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
