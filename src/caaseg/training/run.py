"""A run from its recipe to its model directory: checks, resuming, and the call of the training loop.

A run directory holds recipe.yaml (every value), metrics.jsonl, tensorboard/, checkpoints/, best/ (the model with the
highest validation score) and, when the run is finished, model/.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from caaseg.config import Recipe
from caaseg.data.cache import CachedDataset, estimated_bytes
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError
from caaseg.evaluation.metrics import MetricFactory
from caaseg.files import atomic_write
from caaseg.models import Segmenter
from caaseg.models.heads import resolve_head
from caaseg.models.inference import check_implementation_runs
from caaseg.recipes import load_recipe, save_recipe
from caaseg.training.checkpoints import RECIPE, newest_step, state_to_resume
from caaseg.training.loop import TrainingResult, train_loop
from caaseg.training.losses import Loss
from caaseg.training.memory import check_cache_fits, check_step_fits
from caaseg.training.optim import warn_about_warmup
from caaseg.training.setup import (
    Processes,
    build_model,
    check_classes_of,
    deterministic_algorithms,
    is_first_rank,
    make_fabric,
    open_datasets,
    resolve_processes,
    synchronize_batch_norm,
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
    processes = resolve_processes(device, devices)
    crops = _check_recipe(recipe, processes, model)
    state = state_to_resume(recipe, run, resume)
    train_data, val_data = open_datasets(recipe) if data is None else data
    check_classes_of(recipe, train_data, val_data)
    if processes.device.type != "cuda":
        check_step_fits(recipe, crops, len(train_data.classes))
    model = model or build_model(recipe, train_data, init_from if state is None else None)
    start = 0 if state is None else state["step"]
    if start >= recipe.steps:
        assert state is not None
        return TrainingResult.finished_before(run, state)
    model = synchronize_batch_norm(model, processes)
    if recipe.data.cache:
        check_cache_fits(estimated_bytes(train_data) + estimated_bytes(val_data), processes.local)
        train_data, val_data = CachedDataset(train_data), CachedDataset(val_data)
    if is_first_rank():
        warn_about_warmup(recipe.steps, recipe.optimizer)
        run.mkdir(parents=True, exist_ok=True)
        with atomic_write(run / RECIPE) as temporary:
            save_recipe(recipe, temporary)
    joined_before = dist.is_available() and dist.is_initialized()
    fabric = make_fabric(processes, recipe.precision)
    try:
        fabric.launch()
        with deterministic_algorithms(recipe.deterministic):
            return train_loop(
                fabric,
                recipe,
                model,
                train_data,
                val_data,
                run,
                state=state,
                loss=loss,
                metrics=metrics,
                progress=progress,
            )
    finally:
        if start == newest_step(run) == 0 and is_first_rank():
            (run / RECIPE).unlink(missing_ok=True)  # nothing was trained: the directory is free for other settings
        if dist.is_available() and dist.is_initialized() and not joined_before:
            dist.destroy_process_group()


def _check_recipe(recipe: Recipe, processes: Processes, model: Segmenter | None) -> int:
    """Raise CaasegError if a recipe cannot run on these processes. Return the crops per forward pass."""
    parts = processes.total * recipe.accumulate
    if recipe.batch_size % parts:
        raise CaasegError(
            f"batch_size is {recipe.batch_size}; expected a multiple of {parts}, "
            f"{processes.total} processes times {recipe.accumulate} accumulation steps"
        )
    crops = recipe.batch_size // parts
    synchronized = processes.device.type == "cuda" and processes.total > 1
    head = resolve_head(recipe.model.head) if model is None else type(model.head)
    if crops == 1 and not synchronized and head.needs_two_images:
        raise CaasegError(
            f"each forward pass has 1 crop, but the image-level branch of {head.__name__} needs 2 or more for its "
            "batch statistics; set a larger batch_size or a smaller accumulate"
        )
    if recipe.precision == "16" and processes.device.type != "cuda":
        raise CaasegError("precision is 16, which needs a GPU; use bf16 or 32 on a CPU")
    check_implementation_runs(
        recipe.model.implementation if model is None else model.config.implementation, processes.device
    )
    if processes.total > 1 and processes.device.type != "cuda" and is_first_rank():
        logger.warning("synchronized batch norm is not available on CPU: each process uses its own batch statistics")
    return crops
