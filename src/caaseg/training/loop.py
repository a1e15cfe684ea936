"""The training loop.

The samples and all random numbers of a step depend only on the seed, the step and the rank. So a run that is killed and
resumed ends with the same weights as an uninterrupted run.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from caaseg.config import Recipe
from caaseg.data.loader import EvaluationLoader, TrainingLoader, useful_workers
from caaseg.data.sample import IGNORE, SegmentationDataset
from caaseg.data.transforms import normalize
from caaseg.evaluation.best_worst import BestWorstImages
from caaseg.evaluation.evaluate import Evaluation, evaluate
from caaseg.evaluation.metrics import MetricFactory
from caaseg.models import Prediction, Segmenter
from caaseg.models.cuda_graphs import capture_coarse
from caaseg.models.fused_norm import fuse_batch_norm
from caaseg.models.predictor import Predictor
from caaseg.training.checkpoints import check_finite, write_checkpoint
from caaseg.training.ema import EMA
from caaseg.training.losses import Loss, log_class_weights, make_loss, segmentation_loss
from caaseg.training.memory import explain_out_of_memory, move_to_device, try_step
from caaseg.training.metrics_log import MetricsLog
from caaseg.training.optim import learning_rate, make_optimizer, set_learning_rate
from caaseg.training.ranks import (
    average_gradients,
    copy_first_buffers,
    copy_first_state,
    end_together,
    freeze_unused_parameters,
    match_gradient_strides,
    sum_over_ranks,
)
from caaseg.training.run_directory import explain_write_error
from caaseg.training.setup import check_labels
from caaseg.training.step_log import Progress, StepLog
from caaseg.training.stop_signals import StopSignals

if TYPE_CHECKING:
    from lightning_fabric import Fabric

logger = logging.getLogger(__name__)

RECOMPUTED_BATCHES = 100
"""Training batches for the batch norm statistics of EMA weights, with `optimizer.ema_batch_norm` recomputed."""
DROPOUT_STREAM = 3  # random stream of dropout, part of its seed; `data.loader` defines streams 0 to 2


class TrainingResult(NamedTuple):
    """The result of a run, finished or stopped."""

    run: Path
    step: int
    finished: bool  # False if it was stopped and can be resumed
    mean_iou: float | None  # validation score after the last step
    best_mean_iou: float | None
    best_step: int | None
    recipe: Recipe  # with the resolved number of steps
    stopped_by: int | None = None  # the signal that stopped it
    evaluation: Evaluation | None = None  # of the final model; None if the run was stopped or had finished before
    best_worst: BestWorstImages | None = None  # images of that evaluation

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ended the run before its last step."""
        return self.finished and self.step < self.recipe.steps

    @classmethod
    def finished_before(cls, run: Path, state: dict[str, Any], recipe: Recipe) -> "TrainingResult":
        """Return the result of a run whose newest checkpoint is from its last step."""
        best = state["best"]
        return cls(run, state["step"], True, None, best.get("mean_iou"), best.get("step"), recipe)


def train_loop(
    fabric: "Fabric",
    recipe: Recipe,
    model: Segmenter,
    train_data: SegmentationDataset,
    val_data: SegmentationDataset,
    run: Path,
    *,
    state: dict[str, Any] | None = None,
    identity: dict[str, Any] | None = None,
    loss: Loss | None = None,
    metrics: Sequence[MetricFactory] = (),
    progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train a model from a step to the end of the recipe, or until a signal stops it.

    Args:
        fabric: Lightning Fabric, launched, with device, processes and precision.
        recipe: the settings of the run.
        model: the model, with as many classes as the data.
        train_data: the dataset to train on.
        val_data: the dataset to validate on.
        run: the run directory.
        state: a checkpoint to resume from.
        identity: architecture and data of the run, for its checkpoints.
        loss: the loss; None uses the losses of the recipe.
        metrics: further validation metrics.
        progress: called every few steps on the first rank.
    """
    device, rank, ranks = fabric.device, fabric.global_rank, fabric.world_size
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model = fabric.to_device(model).to(memory_format=layout).train()  # type: ignore[call-overload]
    if recipe.model.freeze_backbone:
        model.backbone.eval()  # batch norm then uses its statistics and does not change them
    # One kernel updates all weights, except with precision 16: it would apply gradients before unscaling and clipping.
    fused = device.type == "cuda" and recipe.precision != "16"
    optimizer: Any = fabric.setup_optimizers(make_optimizer(model, recipe.optimizer, fused=fused))
    ema = None if recipe.optimizer.ema is None else EMA(model, recipe.optimizer.ema)
    best: dict[str, Any] = {}
    start = 0
    if state is not None:
        start, best = state["step"], state["best"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        fabric.strategy.precision.load_state_dict(state["scaler"])
        if ema is not None:
            ema.model.load_state_dict(state["ema"])
    scored = model if ema is None else ema.model  # the model to validate and save
    loss = loss or make_loss(recipe.loss, _class_weights(fabric, recipe, train_data))

    def prepare(images: Tensor) -> Tensor:
        """Normalize uint8 images on the device, (N, 3, H, W)."""
        return normalize(images, model.backbone.mean, model.backbone.std).contiguous(memory_format=layout)

    network = _network(fabric, recipe, model, optimizer, loss, prepare)
    has_ddp = ranks > 1 and not can_capture_graph(recipe, model, ranks)
    on_device = recipe.data.cache == "device"
    if on_device:
        with end_together():
            train_data = move_to_device(train_data, device)
    batches = iter(
        TrainingLoader(
            train_data, recipe.data, batch_size=recipe.batch_size, seed=recipe.seed, step=start,
            workers=recipe.data.workers, rank=rank, ranks=ranks, bad_files=recipe.data.bad_files,
            pin_memory=device.type == "cuda", on_device=on_device,
        )
    )  # fmt: skip
    written = MetricsLog(run, start, recipe.loggers, recipe.as_dict()) if fabric.is_global_zero else None
    log = StepLog(recipe, written, start, progress)
    evaluation, best_worst = None, None
    step = start
    crops = recipe.batch_size // ranks // recipe.accumulate
    in_step = explain_out_of_memory(lambda: f"step {step + 1}", recipe, crops)
    with StopSignals(ranks, device) as stop, log, in_step:
        while step < recipe.steps:
            with log.waiting():
                batch = next(batches)  # images (N, 3, H, W) uint8, labels (N, H, W) uint8
            images, labels = (tensor.to(device, non_blocking=True) for tensor in (batch.images, batch.labels))
            torch.manual_seed(step_seed(recipe.seed, step, rank))
            set_learning_rate(optimizer, learning_rate(step, recipe.steps, recipe.optimizer))

            count = sum_over_ranks(loss.count(labels))
            own_loss = torch.zeros((), device=device)
            parts = list(zip(images.chunk(recipe.accumulate), labels.chunk(recipe.accumulate), strict=True))
            for number, (part_images, part_labels) in enumerate(parts, start=1):
                last_part = number == len(parts)
                with network.no_sync() if has_ddp and not last_part else nullcontext():  # type: ignore[attr-defined]
                    with fabric.autocast():
                        prediction = network(prepare(part_images))  # logits (N, K, h, w), coarse
                        part_loss = segmentation_loss(
                            loss, prediction, part_labels, count, recipe.loss, recipe.batch_size
                        )
                    fabric.backward(part_loss * ranks)  # DDP averages gradients over ranks, but the loss is a sum
                own_loss += part_loss.detach()
            if ranks > 1 and not has_ddp:
                average_gradients(model)
            if recipe.optimizer.clip_grad_norm is not None:
                max_norm = recipe.optimizer.clip_grad_norm
                fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update(model, step)
            step += 1
            log.step(step, own_loss, batch.names, count)

            stopping = stop.agreed()
            is_last = is_finished(recipe, step, best)  # early stopping: corrected below if this validation is the best
            validate = is_last or step % recipe.validate_every == 0
            if not (validate or stopping or step % recipe.checkpoint_every == 0):
                continue
            log.flush()  # raises if the loss was not finite: such weights are not saved
            if validate and ema is not None and recipe.optimizer.ema_batch_norm == "recomputed":
                _recompute_batch_norm(fabric, recipe, ema, model, train_data, prepare)
            with end_together():
                check_finite(step, model, scored)
            is_new_best = False
            if validate:
                copy_first_buffers(scored)  # all ranks validate the model that is saved
                best_worst = BestWorstImages(len(val_data.classes)) if is_last else None
                evaluation = _validate(fabric, recipe, scored, val_data, metrics, best_worst)
                saw_all = (step - start) * recipe.batch_size >= len(train_data) or (is_last and start == 0)
                with end_together():
                    in_training, in_validation = log.saw_labels or not saw_all, bool(evaluation.confusion.any())
                    check_labels(recipe, in_training=in_training, in_validation=in_validation)
                log.validation(step, evaluation)
                is_new_best = not best or evaluation.mean_iou > best["mean_iou"]
                if is_new_best:
                    best = {"step": step, "mean_iou": evaluation.mean_iou}
                    is_last = step == recipe.steps
            save = is_last or stopping or step % recipe.checkpoint_every == 0
            with end_together():  # the other ranks wait here
                if fabric.is_global_zero and is_new_best:
                    save_model(scored, run, "best", recipe, step, log.mean_iou)
                if fabric.is_global_zero and is_last:  # before the checkpoint that marks the run as finished
                    save_model(scored, run, "model", recipe, step, log.mean_iou)
                if fabric.is_global_zero and save:
                    log.sync()
                    write_checkpoint(
                        run,
                        {
                            "step": step,
                            "model": model.state_dict(),
                            "ema": None if ema is None else ema.model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scaler": fabric.strategy.precision.state_dict(),
                            "best": best,
                            **(identity or {}),
                        },
                    )
            log.restart_clock(step)
            if is_last or stopping:
                break
    finished = is_finished(recipe, step, best)
    return TrainingResult(
        run,
        step,
        finished,
        log.mean_iou,
        best.get("mean_iou"),
        best.get("step"),
        recipe,
        None if finished else stop.signal,
        evaluation if finished else None,
        best_worst,
    )


def is_finished(recipe: Recipe, step: int, best: dict[str, Any]) -> bool:
    """Return whether a run ends after a step, because it is the last step or because of early stopping.

    Early stopping counts the validations since the best validation. It depends on checkpointed values only, so that a
    resumed run ends at the same step.

    Args:
        recipe: the settings of the run.
        step: number of finished steps.
        best: step and mean IoU of the best validation so far; empty before the first validation.
    """
    if recipe.early_stopping is None or not best or step % recipe.validate_every:
        return step >= recipe.steps
    return step >= recipe.steps or step - best["step"] >= recipe.early_stopping * recipe.validate_every


def save_model(model: Segmenter, run: Path, name: str, recipe: Recipe, step: int, mean_iou: float | None) -> None:
    """Save a model in a directory of the run, with a card that states how it was trained."""
    score = "" if mean_iou is None else f" Mean IoU on {recipe.data.val_split}: {100 * mean_iou:.2f}."
    text = f"{step} of {recipe.steps} steps of {recipe.batch_size} images on {recipe.data.dataset}.{score}"
    with explain_write_error(run, name):
        model.save_pretrained(run / name, model_card_kwargs={"training": text})


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of dropout for a step on a rank."""
    return int(np.random.SeedSequence((seed, DROPOUT_STREAM, step, rank)).generate_state(1)[0])


class _Forward(nn.Module):
    """A module whose forward returns the coarse prediction, because DistributedDataParallel wraps forward only."""

    def __init__(self, model: Segmenter, forward: Callable[[Tensor], Prediction]) -> None:
        super().__init__()
        self.model = model
        self.coarse = forward

    def forward(self, images: Tensor) -> Prediction:
        return self.coarse(images)


def can_capture_graph(recipe: Recipe, model: nn.Module, ranks: int) -> bool:
    """Return whether `cuda_graph` applies. It does not if the network communicates, as synchronized batch norm does.

    NCCL operations can be captured, but if one rank failed, the others would wait in a replay, without an error message
    or a time limit. Gradients are averaged after the replay instead of by DistributedDataParallel, which communicates
    from hooks that a captured backward pass does not call.
    """
    return recipe.cuda_graph and (ranks == 1 or not any(_communicates(part) for part in model.modules()))


def _communicates(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm) or getattr(module, "communicates", False)


def _network(
    fabric: "Fabric",
    recipe: Recipe,
    model: Segmenter,
    optimizer: Any,
    loss: Loss,
    prepare: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Prediction]:
    """Return the coarse forward pass for training: compiled, fused, captured or wrapped by DDP, as the recipe sets."""

    def blank_images(number: int) -> Tensor:
        return torch.zeros(number, 3, *recipe.data.crop, dtype=torch.uint8, device=fabric.device)

    def compute_loss(forward: Callable[[Tensor], Prediction], number: int) -> Tensor:
        images = blank_images(number)
        labels = torch.zeros_like(images[:, 0])
        with fabric.autocast():
            return segmentation_loss(loss, forward(prepare(images)), labels, loss.count(labels), recipe.loss)

    network: Callable[[Tensor], Prediction] = model.coarse
    if recipe.compile:
        network = torch.compile(model.coarse, dynamic=False)
    can_capture = can_capture_graph(recipe, model, fabric.world_size)
    if recipe.cuda_graph and not can_capture and fabric.is_global_zero:
        logger.warning(
            "cuda_graph is off, because the network communicates with other GPUs and a graph cannot wait for them "
            "safely; set sync_batch_norm false to use the graph, with batch statistics per GPU (head emanet always "
            "communicates)"
        )
    if fabric.world_size > 1 and can_capture:
        copy_first_state(model)
    elif fabric.world_size > 1:
        freeze_unused_parameters(model, lambda: compute_loss(model.coarse, 2))
        match_gradient_strides(model)
        network = fabric.strategy.setup_module(_Forward(model, network))
    if fabric.device.type != "cuda":
        return network
    if recipe.fused_batch_norm:
        fuse_batch_norm(model)
    crops = recipe.batch_size // fabric.world_size // recipe.accumulate
    states = {"adamw": 2, "adam": 2, "rmsprop": 1, "sgd": int(recipe.optimizer.momentum > 0)}[recipe.optimizer.name]
    try_step(model, lambda: compute_loss(network, crops), 0 if optimizer.state else states, recipe, crops)
    if can_capture:
        network = capture_coarse(model, prepare(blank_images(crops)), fabric.autocast)
    return network


def _recompute_batch_norm(
    fabric: "Fabric",
    recipe: Recipe,
    ema: EMA,
    model: Segmenter,
    data: SegmentationDataset,
    prepare: Callable[[Tensor], Tensor],
) -> None:
    """Recompute the batch norm statistics of the EMA weights on the batches of the first steps.

    The statistics depend only on the EMA weights and these batches, so a resumed run has the same ones.
    """
    loader = TrainingLoader(
        data, recipe.data, batch_size=recipe.batch_size, seed=recipe.seed, workers=recipe.data.workers,
        rank=fabric.global_rank, ranks=fabric.world_size, bad_files=recipe.data.bad_files,
        on_device=recipe.data.cache == "device",
    )  # fmt: skip
    batches = islice(loader, min(RECOMPUTED_BATCHES, recipe.steps))
    parts = (part for batch in batches for part in batch.images.to(fabric.device).chunk(recipe.accumulate))

    def forward(images: Tensor) -> None:
        with fabric.autocast():
            ema.model.coarse(prepare(images))

    ema.recompute_batch_norm(model, parts, forward)


def _validate(
    fabric: "Fabric",
    recipe: Recipe,
    model: Segmenter,
    data: SegmentationDataset,
    metrics: Sequence[MetricFactory],
    best_worst: BestWorstImages | None,
) -> Evaluation:
    """Score whole images of the validation split, each once over all ranks."""
    predictor = Predictor(model, precision="32" if recipe.precision == "32" else "bf16")
    on_batch = None if best_worst is None else best_worst.update
    workers = _reading_workers(recipe, data, fabric.world_size)
    evaluation = evaluate(predictor, data, metrics=metrics, workers=workers, on_batch=on_batch)
    if best_worst is not None:
        best_worst.gather()
    return evaluation


def _class_weights(fabric: "Fabric", recipe: Recipe, data: SegmentationDataset) -> Tensor | None:
    """Return the loss weight per class. The setting "log" reads every training label."""
    setting = recipe.loss.class_weights
    if setting == "none":
        return None
    if setting != "log":
        return torch.tensor(setting, device=fabric.device)
    counts = torch.zeros(IGNORE + 1, dtype=torch.int64)
    workers = _reading_workers(recipe, data, fabric.world_size)
    loader = EvaluationLoader(
        data, workers=workers, rank=fabric.global_rank, ranks=fabric.world_size, bad_files=recipe.data.bad_files
    )
    for batch in loader:
        counts += torch.bincount(batch.labels.flatten(), minlength=IGNORE + 1)
    return log_class_weights(sum_over_ranks(counts[: len(data.classes)].to(fabric.device)))


def _reading_workers(recipe: Recipe, data: SegmentationDataset, ranks: int) -> int:
    """Return the number of workers to read a dataset once; 0 for cached data."""
    return 0 if recipe.data.cache else useful_workers(recipe.data.workers, len(data) // ranks)
