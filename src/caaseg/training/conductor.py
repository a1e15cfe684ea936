"""What happens when in a run: steps are counted and timed, read one later, validated, saved, and stopped by signals."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from caaseg.config import Recipe
from caaseg.data.sample import Batch
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models import Segmenter
from caaseg.training import checkpoints
from caaseg.training.metrics_log import Journal
from caaseg.training.module import Outcome, TrainingModule
from caaseg.training.schedule import learning_rate

import lightning as L  # isort: skip  # after module, which makes its import possible

LOG_EVERY = 10  # steps between two lines of the journal


class Progress(NamedTuple):
    """How far a run is, for whoever shows it."""

    step: int
    steps: int
    loss: float
    images_per_second: float
    mean_iou: float | None  # of the last validation


class Result(NamedTuple):
    """What a run came to."""

    folder: Path
    step: int
    finished: bool  # otherwise it was stopped, and can be resumed
    mean_iou: float | None  # on the validation split, after the last step
    best_mean_iou: float | None
    best_step: int | None
    stopped_by: int | None = None  # the signal that stopped it, where this process got one


class Conductor(L.Callback):
    """What happens when: lines of the journal, validation, checkpoints, the saved model, stopping."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        start: int,
        best: dict[str, Any],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.start = start
        self.best = best
        self.progress = progress
        self.mean_iou: float | None = None
        self.stopped_by: int | None = None
        self.journal: Journal | None = None
        self._unread: Outcome | None = None
        self._clock_start = 0.0
        self._clock_step = start
        self._batch_ended = 0.0
        self._waited = 0.0  # seconds for the next batch, since the clock's start

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        module = pl_module
        if trainer.is_global_zero:
            self.journal = Journal(self.folder, self.start)

        def stop(number: int, frame: Any) -> None:
            module.stop_asked = True
            self.stopped_by = number
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait for the step

        if threading.current_thread() is threading.main_thread():  # others may not
            # Lightning has set its own by now, which takes no care of what ranks are at; it restores what was before.
            signal.signal(signal.SIGTERM, stop)
            signal.signal(signal.SIGINT, stop)
        self._batch_ended = time.perf_counter()
        self._restart_clock(module.step)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._waited += time.perf_counter() - self._batch_ended

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        module, recipe, step = pl_module, self.recipe, pl_module.step
        last = step == recipe.steps
        validate = last or step % recipe.validate_every == 0
        save = last or module.stopping or step % recipe.checkpoint_every == 0
        self._read()  # the step before: the device has long done it
        self._unread = module.outcome
        self._batch_ended = time.perf_counter()
        if not (validate or save):
            return
        self._read()
        if validate:
            self._validated(module.validate(), module)
        if last and trainer.is_global_zero:  # before the checkpoint that says that all is done
            save_model(module.scored, self.folder / "model", recipe, step, self.mean_iou)
        if save and self.journal is not None:
            self.journal.sync()
            checkpoints.write_checkpoint(self.folder, {**module.state(), "best": self.best})
        trainer.should_stop = module.stopping
        trainer.strategy.barrier()
        self._batch_ended = time.perf_counter()
        self._restart_clock(step)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    def result(self, step: int) -> Result:
        return Result(
            self.folder,
            step,
            step >= self.recipe.steps,
            self.mean_iou,
            self.best.get("mean_iou"),
            self.best.get("step"),
            None if step >= self.recipe.steps else self.stopped_by,
        )

    def _read(self) -> None:
        outcome, self._unread = self._unread, None
        if outcome is None:
            return
        outcome.check()
        if outcome.step % LOG_EVERY and outcome.step != self.recipe.steps:
            return
        loss, seconds = float(outcome.loss), time.perf_counter() - self._clock_start
        speed = (outcome.step - self._clock_step) * self.recipe.batch_size / max(seconds, 1e-9)
        waiting = self._waited / max(seconds, 1e-9)
        self._restart_clock(outcome.step)
        if self.journal is not None:
            rate = learning_rate(outcome.step - 1, self.recipe.steps, self.recipe.optimizer)
            self.journal.write(outcome.step, {"loss": loss, "lr": rate, "images_per_second": speed, "waiting": waiting})
            if self.progress is not None:
                self.progress(Progress(outcome.step, self.recipe.steps, loss, speed, self.mean_iou))

    def _validated(self, matrix: ConfusionMatrix, module: TrainingModule) -> None:
        self.mean_iou = matrix.mean_iou
        if self.journal is None:  # not the first rank
            return
        classes = module.val_data.classes
        self.journal.write(
            module.step,
            {
                "val_mean_iou": matrix.mean_iou,
                "val_pixel_accuracy": matrix.pixel_accuracy,
                "val_mean_accuracy": matrix.mean_accuracy,
                "val_iou": dict(zip(classes, matrix.iou.tolist(), strict=True)),
            },
        )
        if not self.best or matrix.mean_iou > self.best["mean_iou"]:
            self.best = {"step": module.step, "mean_iou": matrix.mean_iou}
            save_model(module.scored, self.folder / "best", self.recipe, module.step, matrix.mean_iou)

    def _restart_clock(self, step: int) -> None:
        """After this step, so that validation and saving do not count as slow training."""
        self._clock_start, self._clock_step, self._waited = time.perf_counter(), step, 0.0


def save_model(model: Segmenter, folder: Path, recipe: Recipe, step: int, mean_iou: float | None) -> None:
    """Save a model with a card that says what it was trained on."""
    score = "" if mean_iou is None else f" Mean IoU on {recipe.data.val_split}: {100 * mean_iou:.2f}."
    text = f"{step} of {recipe.steps} steps of {recipe.batch_size} images on {recipe.data.dataset}.{score}"
    model.save_pretrained(folder, model_card_kwargs={"training": text})
