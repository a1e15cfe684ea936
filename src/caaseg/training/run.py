"""A run from its recipe to its model directory: checks, resuming, and the call of the training loop.

A run directory holds recipe.yaml (every value), metrics.jsonl, tensorboard/, checkpoints/, best/ (the model with the
highest validation score) and, when the run is finished, model/.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from caaseg.config import Architecture, Recipe
from caaseg.data.cache import CachedDataset, estimated_bytes
from caaseg.data.resized import ResizedDataset
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError
from caaseg.evaluation.metrics import MetricFactory
from caaseg.files import atomic_write
from caaseg.models import Segmenter, load_model
from caaseg.models.heads import resolve_head
from caaseg.models.inference import check_implementation_runs
from caaseg.models.saving import CONFIG, WEIGHTS
from caaseg.recipes import load_recipe, recipe_text
from caaseg.training.checkpoints import RECIPE, check_finite, check_state, newest_step, state_to_resume
from caaseg.training.fingerprint import fingerprint
from caaseg.training.loggers import check_loggers
from caaseg.training.loop import TrainingResult, is_finished, save_model, train_loop
from caaseg.training.losses import Loss
from caaseg.training.memory import check_cache_fits, check_step_fits
from caaseg.training.metrics_log import FILE as METRICS
from caaseg.training.metrics_log import read_metrics
from caaseg.training.optim import warn_about_warmup
from caaseg.training.ranks import end_together, joined_ranks, launch
from caaseg.training.run_directory import explain_write_error, lock_run
from caaseg.training.setup import (
    Processes,
    adopt_architecture,
    are_ranks_running,
    build_model,
    check_classes_of,
    deterministic_algorithms,
    freeze,
    is_batch_norm_synchronized,
    is_first_rank,
    make_fabric,
    open_datasets,
    resolve_epochs,
    resolve_processes,
    set_batch_norm_momentum,
    synchronize_batch_norm,
    timm_backbone,
    training_size,
)
from caaseg.training.step_log import Progress

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    data: tuple[SegmentationDataset, SegmentationDataset] | None = None,
    model: Segmenter | None = None,
    loss: Loss | None = None,
    metrics: Sequence[MetricFactory] = (),
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    device: str = "auto",
    devices: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train a model; see `caaseg.train`, which also writes the report."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    run = Path(out)
    if init_from is not None:
        recipe = recipe.starting_from(str(init_from))
    if recipe.init_from is not None:
        if model is not None:
            raise CaasegError(f"init_from is {recipe.init_from}, but the argument model is set too; omit one of them")
        recipe = adopt_architecture(recipe, _initial_architecture(recipe.init_from, run, resume))
    check_loggers(recipe.loggers)
    processes = resolve_processes(device, devices)
    crops = _check_recipe(recipe, processes, model)
    train_data, val_data = open_datasets(recipe) if data is None else data
    check_classes_of(recipe, train_data, val_data)
    recipe = resolve_epochs(recipe, len(train_data))
    if processes.device.type != "cuda":
        check_step_fits(recipe, crops, len(train_data.classes))
    if recipe.data.cache:
        check_cache_fits(estimated_bytes(train_data) + estimated_bytes(val_data), processes.local, recipe.data.cache)
    fabric = make_fabric(processes, recipe.precision)
    with ExitStack() as directory, joined_ranks() as started:
        if are_ranks_running():
            launch(fabric)
        with end_together():
            if is_first_rank():
                directory.enter_context(lock_run(run))
            checkpoint = state_to_resume(recipe, run, resume)
            state = None if checkpoint is None else checkpoint[1]
            limit, sides = training_size(recipe, train_data)
            initial = None if recipe.init_from is None or state is not None else load_model(recipe.init_from)
            resumed = {} if state is None else state.get("config", {})
            weights_license = resumed.get("license") if initial is None else initial.config.license
            model = model or build_model(recipe, train_data, initial, sides, weights_license)
            freeze(model, recipe.model)
            identity = {
                "config": model.config.as_dict(),
                "recipe": recipe.as_dict(),
                "data": {"train": fingerprint(train_data), "val": fingerprint(val_data)} if is_first_rank() else {},
            }
            if checkpoint is not None:
                check_state(*checkpoint, recipe, model, identity["data"])
            if state is not None and is_finished(recipe, state["step"], state["best"]):
                if is_first_rank():
                    _rebuild_model(recipe, run, model, state)
                return TrainingResult.finished_before(run, state, recipe)
            if is_first_rank():
                warn_about_warmup(recipe.steps, recipe.optimizer)
                _check_own_files(run)
                read_metrics(run / METRICS)  # raises if a line is damaged
                directory.enter_context(_saved_recipe(recipe, run))
        if is_batch_norm_synchronized(recipe, processes):
            model = synchronize_batch_norm(model)
        set_batch_norm_momentum(model, recipe.batch_norm_momentum)
        if recipe.model.gradient_checkpointing:
            timm_backbone(model, "model.gradient_checkpointing").checkpoint_gradients()
        if limit is not None:
            train_data = ResizedDataset(train_data, limit)
        if recipe.data.cache:
            train_data, val_data = CachedDataset(train_data), CachedDataset(val_data)
        if not are_ranks_running():
            started += launch(fabric)
        with deterministic_algorithms(recipe.deterministic):
            return train_loop(
                fabric,
                recipe,
                model,
                train_data,
                val_data,
                run,
                state=state,
                identity=identity,
                loss=loss,
                metrics=metrics,
                progress=progress,
            )


def _initial_architecture(init_from: str, run: Path, resume: str | Path | None) -> Architecture:
    """Return the architecture of the model to start from. A resumed run does not need that model any more."""
    if resume is not None and (run / RECIPE).is_file():
        saved = load_recipe(run / RECIPE)
        if saved.init_from == init_from:
            return saved.model
    config: Architecture = load_model(init_from).config
    return config


def _check_own_files(run: Path) -> None:
    """Raise CaasegError if a directory without a run has the user's own files under the names of a run's files."""
    found = [name for name in (METRICS, "best", "model", "report.html") if (run / name).exists()]
    if found and not (run / RECIPE).exists():
        raise CaasegError(
            f"{run / found[0]}: exists, but no run wrote it, because there is no {run / RECIPE}; choose another --out, "
            "or move it"
        )


@contextmanager
def _saved_recipe(recipe: Recipe, run: Path) -> Iterator[None]:
    """Write recipe.yaml. If nothing is trained, delete the files at the end: another run can then use the directory."""
    with explain_write_error(run, RECIPE), atomic_write(run / RECIPE) as temporary:
        temporary.write_text(recipe_text(recipe), encoding="utf-8")
    try:
        yield
    finally:
        if newest_step(run) == 0:
            for name in (RECIPE, METRICS):
                (run / name).unlink(missing_ok=True)
            shutil.rmtree(run / "best", ignore_errors=True)


def _rebuild_model(recipe: Recipe, run: Path, model: Segmenter, state: dict[str, Any]) -> None:
    """Save the model of a finished run again if its files are missing."""
    if all((run / "model" / name).is_file() for name in (CONFIG, WEIGHTS)):
        return
    model.load_state_dict(state["model"] if state["ema"] is None else state["ema"])
    check_finite(state["step"], model)
    scores = [line["val_mean_iou"] for line in read_metrics(run / METRICS) if "val_mean_iou" in line]
    save_model(model, run, "model", recipe, state["step"], scores[-1] if scores else None)
    logger.warning("%s: the model was missing and is saved again from the last checkpoint", run / "model")


def _check_recipe(recipe: Recipe, processes: Processes, model: Segmenter | None) -> int:
    """Raise CaasegError if a recipe cannot run on these processes. Return the crops per forward pass."""
    parts = processes.total * recipe.accumulate
    if recipe.batch_size % parts:
        raise CaasegError(
            f"batch_size is {recipe.batch_size}; expected a multiple of {parts}, "
            f"{processes.total} processes times {recipe.accumulate} accumulation steps"
        )
    if recipe.accumulate > 1 and (recipe.model if model is None else model.config).car:
        raise CaasegError(
            f"accumulate is {recipe.accumulate}, but the class centers of model.car need the whole batch at once; "
            "use accumulate 1"
        )
    crops = recipe.batch_size // parts
    synchronized = is_batch_norm_synchronized(recipe, processes)
    head = resolve_head(recipe.model.head) if model is None else type(model.head)
    if crops == 1 and not synchronized and head.needs_two_images:
        raise CaasegError(
            f"each forward pass has 1 crop, but the image-level branch of {head.__name__} needs 2 or more for its "
            "batch statistics; set a larger batch_size or a smaller accumulate"
        )
    if recipe.data.cache == "device" and processes.device.type == "mps":
        raise CaasegError("data.cache is device, which needs an NVIDIA GPU, or a CPU to try it; use true on mps")
    if recipe.precision == "16" and processes.device.type != "cuda":
        raise CaasegError("precision is 16, which needs a GPU; use bf16 or 32 on a CPU")
    check_implementation_runs(
        recipe.model.implementation if model is None else model.config.implementation, processes.device
    )
    is_cpu = processes.device.type != "cuda"
    if processes.total > 1 and is_cpu and recipe.sync_batch_norm and is_first_rank():
        logger.warning("synchronized batch norm is not available on CPU: each process uses its own batch statistics")
    return crops
