"""Runner of a grid: trains and scores each cell, and writes its result to a file.

A cell whose file exists is not run again, even if its run directory was deleted, so the files can be copied to another
machine and the grid resumed there. A killed grid resumes at its first unfinished cell, and a killed run at its newest
checkpoint. Commands that run different rows may share a directory at the same time. Each creates a marker file while
it runs. The file of a cell says whether its command was alone on the machine; if not, its speed is not used.
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
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from caaseg.api import REPORT, write_report
from caaseg.config import Recipe
from caaseg.data.loader import useful_workers
from caaseg.errors import CaasegError
from caaseg.evaluation.evaluate import Evaluation, evaluate
from caaseg.files import atomic_write
from caaseg.models import load_model
from caaseg.models.heads import own_head
from caaseg.models.predictor import Precision, Predictor
from caaseg.recipes import load_recipe
from caaseg.reproduce.grid import Cell, EvaluationProtocol, Grid
from caaseg.training import checkpoints
from caaseg.training.checkpoints import MAY_CHANGE
from caaseg.training.metrics_log import FILE as METRICS
from caaseg.training.metrics_log import read_metrics
from caaseg.training.run import train
from caaseg.training.setup import open_split
from caaseg.training.step_log import Progress

SAFETY_FACTOR = 1.1  # multiplies the estimated duration of a cell
MARKER_PREFIX = f".running.{socket.gethostname()}."
"""Name of a marker file without the process id of its command."""


class StopSignalError(BaseException):
    """A signal requested a stop. Unfinished work can be resumed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class GridStatus(NamedTuple):
    """State of a grid after a command."""

    left: int  # unfinished cells
    signal: int | None  # the signal that stopped the command
    out_of_time: bool


def run_grid(
    grid: Grid,
    *,
    device: torch.device,
    origin: Mapping[str, Any],
    keep_runs: bool = True,
    limit_s: float | None = None,
    log: Callable[[str], None] = lambda message: None,
    progress: Callable[[Progress], None] | None = None,
) -> GridStatus:
    """Run the unfinished cells within the time limit.

    Args:
        grid: the grid, from `plan_grid`.
        device: device to run on.
        origin: command, commit, hardware and versions, written to each cell's file.
        keep_runs: keep the run directories of finished cells, with weights and checkpoints.
        limit_s: start no cell that would not finish within this many seconds, estimated from the finished cells.
        log: called with one message per cell.
        progress: called with the training progress of a cell.
    """
    start = time.monotonic()
    unfinished = [cell for cell in grid.cells if not _is_finished(grid, cell)]  # raises if recipes differ
    status = GridStatus(len(unfinished), None, False)

    def clean_up(cell: Cell) -> None:
        if not keep_runs:
            shutil.rmtree(grid.run(cell), ignore_errors=True)

    try:
        with _stop_signals_raised(), _marker(grid):
            for cell in grid.cells:
                if cell not in unfinished:
                    clean_up(cell)  # an earlier command may have been killed before its clean-up
            for cell in unfinished:
                needed_s = _estimate_seconds(grid, cell, origin)
                if limit_s is not None and needed_s is not None:
                    left_s = limit_s - (time.monotonic() - start)
                    if needed_s > left_s:
                        log(f"{cell.name} takes about {needed_s:.0f} s, and {max(0, left_s):.0f} s are left")
                        return status._replace(out_of_time=True)
                log(f"{cell.name}: {status.left} of {len(grid.cells)} cells are left")
                _run_cell(grid, cell, device, origin, progress)
                clean_up(cell)
                status = status._replace(left=status.left - 1)
    except StopSignalError as stop:
        return status._replace(signal=stop.number)
    return status


def finished_grid(grid: Grid) -> Grid:
    """Return a grid of the finished cells and their rows. Raises if there are none, or if a cell has another recipe."""
    cells = tuple(cell for cell in grid.cells if _is_finished(grid, cell))
    if not cells:
        raise CaasegError(f"{grid.directory / 'cells'} has no finished cell of this table; leave out --report-only")
    by_row = {key: cell for key, cell in grid.by_row.items() if cell in cells}
    rows = tuple(row for row in grid.rows if any(name == row.name for name, _ in by_row))
    return replace(grid, rows=rows, cells=cells, by_row=by_row)


def score_of(record: Mapping[str, Any], protocol: EvaluationProtocol) -> dict[str, Any] | None:
    """Return the scores of a cell for a protocol, or None if the cell was not scored with it."""
    for score in record["scores"]:
        if EvaluationProtocol(score["split"], tuple(score["scales"]), score["flip"]) == protocol:
            found: dict[str, Any] = score
            return found
    return None


def read_cell(path: Path) -> dict[str, Any] | None:
    """Return the content of a cell's file, or None if it does not exist."""
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"recipe", "scores", "hardware"} <= content.keys():
            raise ValueError("keys are missing")
    except (ValueError, AttributeError) as error:
        raise CaasegError(f"{path}: not the file of a cell ({error}); delete it to run the cell again") from error
    return content


@contextmanager
def _marker(grid: Grid) -> Iterator[None]:
    """Create a marker file while this command runs, for other commands in the same directory."""
    marker, is_new = grid.directory / f"{MARKER_PREFIX}{os.getpid()}", not grid.directory.exists()
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        yield
    finally:
        marker.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # not empty: the grid has results
                grid.directory.rmdir()


def _is_alone(grid: Grid) -> bool:
    """Return whether no other command runs in this directory on this machine. Deletes markers of killed commands."""
    for marker in grid.directory.glob(f"{MARKER_PREFIX}*"):
        number = marker.name.removeprefix(MARKER_PREFIX)
        if not number.isdecimal():  # of another machine whose name starts with the name of this one
            continue
        process = int(number)
        if process == os.getpid():
            continue
        try:
            os.kill(process, 0)  # signal 0 only checks that the process exists
            return False
        except ProcessLookupError:
            marker.unlink(missing_ok=True)
        except PermissionError:  # a process of another user
            return False
    return True


@contextmanager
def _stop_signals_raised() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into StopSignalError. Training installs its own handlers."""
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # worker processes inherit the handler
            raise StopSignalError(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_finished(grid: Grid, cell: Cell) -> bool:
    """Return whether a cell's file has all scores. Raises CaasegError if it was trained with another recipe."""
    path = grid.file(cell)
    record = read_cell(path)
    if record is None:
        return False
    trained = Recipe.read(record["recipe"], f"{path}: ")
    changed = {key: pair for key, pair in trained.differences(cell.recipe).items() if key not in MAY_CHANGE}
    if changed:
        listed = ", ".join(f"{key} was {old} and is {new}" for key, (old, new) in changed.items())
        raise CaasegError(
            f"{path}: the cell was trained with different settings: {listed}; use the same values, another --out, or "
            "delete the file and its run to train it again"
        )
    unscored = [protocol for protocol in cell.protocols if score_of(record, protocol) is None]
    if unscored and not (grid.run(cell) / "model").is_dir():
        scored = "; ".join(f"{score['split']} at {score['scales']}" for score in record["scores"])
        wanted = f"{unscored[0].split} at {list(unscored[0].scales)}"
        raise CaasegError(
            f"{path}: scored on {scored}, but not on {wanted}, and {grid.run(cell)} has no model any more; use "
            "one of its protocols, or delete the file to train it again"
        )
    return not unscored


def _run_cell(
    grid: Grid,
    cell: Cell,
    device: torch.device,
    origin: Mapping[str, Any],
    progress: Callable[[Progress], None] | None,
) -> None:
    """Train a cell, or resume it, score it and write its file."""
    record, evaluation = read_cell(grid.file(cell)), None
    if record is None:
        trained, evaluation = _train(grid, cell, device, progress)
        record = {**trained, **origin, "scores": []}
    model = load_model(grid.run(cell), head=own_head(cell.recipe.model.head)).to(device)
    record["parameters"] = sum(weight.numel() for weight in model.parameters())
    for protocol in cell.protocols:
        if score_of(record, protocol) is None:
            record["scores"].append(_score(model, cell.recipe, protocol, evaluation))
    with atomic_write(grid.file(cell)) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _train(
    grid: Grid, cell: Cell, device: torch.device, progress: Callable[[Progress], None] | None
) -> tuple[dict[str, Any], Evaluation | None]:
    """Train a cell. Return its results without scores, and the validation of the final model if it was trained now."""
    directory, recipe = grid.run(cell), cell.recipe
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()  # frees the reference cycles of the previous cell
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    first_step = checkpoints.newest_step(directory)
    alone = _is_alone(grid)
    start = time.perf_counter()
    result = train(recipe, directory, resume="auto", device=str(device), progress=progress)
    seconds = time.perf_counter() - start
    if not result.finished:
        raise StopSignalError(result.stopped_by or signal.SIGTERM)
    if not (directory / REPORT).exists():
        write_report(recipe, result, None, str(device))
    lines = read_metrics(directory / METRICS)
    speeds = [line["images_per_second"] for line in lines if "loss" in line][1:]  # without the warm-up
    record = {
        "row": cell.row,
        "seed": cell.seed,
        "recipe": recipe.as_dict(),
        "steps": result.step,
        "val_mean_iou": [line["val_mean_iou"] for line in lines if "val_mean_iou" in line][-1],
        "best_val_mean_iou": result.best_mean_iou,
        "best_step": result.best_step,
        "alone": alone and _is_alone(grid),
        "training_seconds": None if first_step else seconds,  # unknown for a resumed run
        "images_per_second": statistics.median(speeds) if speeds else None,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if on_gpu and first_step < result.step else None,
    }
    return record, result.evaluation


def _score(
    model: torch.nn.Module, recipe: Recipe, protocol: EvaluationProtocol, validation: Evaluation | None
) -> dict[str, Any]:
    """Score a model. The last validation of its training is reused if the protocol is the same."""
    precision: Precision = "32" if recipe.precision == "32" else "bf16"
    if validation is not None and protocol == EvaluationProtocol(recipe.data.val_split, (1.0,), False):
        scores = validation
    else:
        data = open_split(recipe, protocol.split)
        predictor = Predictor(model, scales=protocol.scales, flip=protocol.flip, precision=precision)
        scores = evaluate(predictor, data, workers=useful_workers(recipe.data.workers, len(data)))
    if not scores.confusion.any():
        raise CaasegError(f"split {protocol.split} of {recipe.data.dataset} has no labeled pixel; use another --split")
    return {
        "split": protocol.split,
        "scales": list(protocol.scales),
        "flip": protocol.flip,
        "precision": precision,
        "images": scores.images,
        "mean_iou": scores.mean_iou,
        "pixel_accuracy": scores.pixel_accuracy,
        "mean_accuracy": scores.mean_accuracy,
        "iou": {name: None if math.isnan(iou) else iou for name, iou in zip(scores.classes, scores.iou, strict=True)},
        "seconds": scores.seconds,
    }


def _estimate_seconds(grid: Grid, cell: Cell, origin: Mapping[str, Any]) -> float | None:
    """Estimate the remaining duration of a cell.

    The estimate is the duration of the longest finished cell of the same row on the same kind of device or, if that row
    has no finished cell, of any row. None if no cell is finished.
    """
    seconds: dict[str, float] = {}  # by row
    for other in grid.cells:
        record = read_cell(grid.file(other))
        if record is not None and record["hardware"]["device"] == origin["hardware"]["device"]:
            training, speed = record["training_seconds"], record["images_per_second"]
            if training is None and speed is not None:
                training = record.get("steps", other.recipe.steps) * other.recipe.batch_size / speed
            total = (training or 0) + sum(score["seconds"] for score in record["scores"])
            seconds[other.row] = max(total, seconds.get(other.row, 0))
    if not seconds:
        return None
    run = grid.run(cell)
    done = checkpoints.newest_step(run)
    # The recipe of a run has the number of steps that its epochs take.
    remaining = 1 - done / load_recipe(run / checkpoints.RECIPE).steps if done else 1
    return SAFETY_FACTOR * seconds.get(cell.row, max(seconds.values())) * max(remaining, 0)
