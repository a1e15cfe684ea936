"""Loss, learning rate and speed of the training steps, for the metrics log and progress bars."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.evaluation.evaluate import Evaluation
from caaseg.training.metrics_log import MetricsLog
from caaseg.training.optim import learning_rate

LOG_EVERY = 10  # steps


class Progress(NamedTuple):
    """The state of a run, for progress bars."""

    step: int
    steps: int
    loss: float
    images_per_second: float
    mean_iou: float | None  # of the last validation


class NonFiniteLossError(CaasegError):
    """The loss is infinite or NaN."""


class StepLog:
    """Writes loss, learning rate and speed to the metrics log and the progress callback.

    The loss of a step is read one step later from pinned memory, so that the host never waits for the GPU's current
    step. Speed does not include validation and checkpoints.
    """

    def __init__(
        self,
        recipe: Recipe,
        metrics: MetricsLog | None,
        start: int,
        progress: Callable[[Progress], None] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.recipe = recipe
        self.mean_iou: float | None = None
        self._metrics = metrics  # on the first rank
        self._progress = progress
        self._pending: tuple[int, Tensor, torch.cuda.Event | None, tuple[str, ...]] | None = None
        self.restart_clock(start)

    def __enter__(self) -> "StepLog":
        self.restart_clock(self._clock_step)
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            self._metrics.close()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time spent waiting for data."""
        start = self._clock()
        yield
        self._waiting_s += self._clock() - start

    def step(self, step: int, own_loss: Tensor, names: tuple[str, ...]) -> None:
        """Start to copy this step's loss to the host, and read the previous step's."""
        losses = torch.stack([sum_over_ranks(own_loss.clone()), own_loss])  # of all ranks, and of this one
        event = None
        if losses.is_cuda:
            pinned = torch.empty(2, pin_memory=True)
            pinned.copy_(losses, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            losses = pinned
        self.flush()
        self._pending = step, losses, event, names

    def flush(self) -> None:
        """Read the pending loss. Raises NonFiniteLossError if this rank's part of it is not finite."""
        if self._pending is None:
            return
        (step, losses, event, names), self._pending = self._pending, None
        if event is not None:
            event.synchronize()  # waits for the copy, not for the work queued after it
        loss, own_loss = losses.tolist()
        if not math.isfinite(own_loss):
            raise NonFiniteLossError(
                f"step {step}: the loss is {own_loss} for the files {', '.join(names)}; expected a finite value; check "
                "these files, lower optimizer.lr, set optimizer.clip_grad_norm or a longer warm-up, or use precision 32"
            )
        if step % LOG_EVERY and step != self.recipe.steps:
            return
        seconds = max(self._clock() - self._clock_start, 1e-9)
        speed = (step - self._clock_step) * self.recipe.batch_size / seconds
        waiting = self._waiting_s / seconds
        self.restart_clock(step)
        if self._metrics is not None:
            lr = learning_rate(step - 1, self.recipe.steps, self.recipe.optimizer)
            self._metrics.write(step, {"loss": loss, "lr": lr, "images_per_second": speed, "waiting": waiting})
            if self._progress is not None:
                self._progress(Progress(step, self.recipe.steps, loss, speed, self.mean_iou))

    def validation(self, step: int, evaluation: Evaluation) -> None:
        """Write the scores of a validation."""
        self.mean_iou = evaluation.mean_iou
        if self._metrics is not None:
            scores: dict[str, Any] = {f"val_{name}": score for name, score in evaluation.scores.items()}
            self._metrics.write(step, {**scores, "val_iou": dict(zip(evaluation.classes, evaluation.iou, strict=True))})

    def sync(self) -> None:
        """Flush the metrics log to disk."""
        if self._metrics is not None:
            self._metrics.sync()

    def restart_clock(self, step: int) -> None:
        """Measure speed from the end of this step."""
        self._clock_start, self._clock_step, self._waiting_s = self._clock(), step, 0.0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor
