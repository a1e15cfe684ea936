"""Loss, learning rate and speed of the training steps, for the metrics log and progress output."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.evaluation.evaluate import Evaluation
from caaseg.training.metrics_log import MetricsLog
from caaseg.training.optim import learning_rate
from caaseg.training.ranks import end_together, sum_over_ranks

LOG_EVERY = 10  # steps


class Progress(NamedTuple):
    """The state of a run, for progress bars and log lines."""

    step: int
    steps: int
    loss: float
    images_per_second: float
    seconds_left: float  # estimated from all steps so far, with validations and checkpoints
    mean_iou: float | None  # of the last validation
    is_validation: bool = False  # True if reported after a validation, False after a step


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
        self.saw_labels = False  # whether any step so far had a labeled pixel
        self._metrics = metrics  # on the first rank
        self._progress = progress
        self._pending: tuple[int, Tensor, torch.cuda.Event | None, tuple[str, ...]] | None = None
        self._loss, self._speed = math.nan, 0.0  # loss of the last step, and images per second
        self._run_start, self._first_step = clock(), start
        self.restart_clock(start)

    def __enter__(self) -> "StepLog":
        self._run_start = self._clock()
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

    def step(self, step: int, own_loss: Tensor, names: tuple[str, ...], count: Tensor) -> None:
        """Start to copy the loss of this step to the host, and read the loss of the previous step.

        Args:
            step: number of the step.
            own_loss: this rank's part of the loss.
            names: names of this rank's samples.
            count: divisor of the loss over all ranks; 0 if no pixel is labeled.
        """
        losses = torch.stack([sum_over_ranks(own_loss.clone()), own_loss, (count > 0).any().to(own_loss)])
        event = None
        if losses.is_cuda:
            pinned = torch.empty(3, pin_memory=True)
            pinned.copy_(losses, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            losses = pinned
        self.flush()
        self._pending = step, losses, event, names

    def flush(self) -> None:
        """Read the pending loss. Raises NonFiniteLossError if it is not finite, on all ranks together."""
        if self._pending is None:
            return
        (step, losses, event, names), self._pending = self._pending, None
        if event is not None:
            event.synchronize()  # waits for the copy, not for the work queued after it
        loss, own_loss, has_labels = losses.tolist()
        self._loss = loss
        self.saw_labels |= bool(has_labels)
        if not math.isfinite(loss):  # the same on all ranks
            with end_together():
                if not math.isfinite(own_loss):
                    raise NonFiniteLossError(
                        f"step {step}: the loss is {own_loss} for the files {', '.join(names)}; "
                        "expected a finite value; check these files, lower optimizer.lr, set optimizer.clip_grad_norm "
                        "or a longer warm-up, or use precision 32"
                    )
        if step % LOG_EVERY and step != self.recipe.steps:
            return
        seconds = max(self._clock() - self._clock_start, 1e-9)
        speed = self._speed = (step - self._clock_step) * self.recipe.batch_size / seconds
        waiting = self._waiting_s / seconds
        self.restart_clock(step)
        if self._metrics is not None:
            lr = learning_rate(step - 1, self.recipe.steps, self.recipe.optimizer)
            self._metrics.write(step, {"loss": loss, "lr": lr, "images_per_second": speed, "waiting": waiting})
            self._report(step)

    def validation(self, step: int, evaluation: Evaluation) -> None:
        """Write the scores of a validation."""
        self.mean_iou = evaluation.mean_iou
        if self._metrics is not None:
            scores: dict[str, Any] = {f"val_{name}": score for name, score in evaluation.scores.items()}
            self._metrics.write(step, {**scores, "val_iou": dict(zip(evaluation.classes, evaluation.iou, strict=True))})
            self._report(step, is_validation=True)

    def _report(self, step: int, *, is_validation: bool = False) -> None:
        if self._progress is None:
            return
        steps = self.recipe.steps
        left = (self._clock() - self._run_start) / max(step - self._first_step, 1) * (steps - step)
        self._progress(Progress(step, steps, self._loss, self._speed, left, self.mean_iou, is_validation))

    def sync(self) -> None:
        """Flush the metrics log to disk."""
        if self._metrics is not None:
            self._metrics.sync()

    def restart_clock(self, step: int) -> None:
        """Measure speed from the end of this step."""
        self._clock_start, self._clock_step, self._waiting_s = self._clock(), step, 0.0
