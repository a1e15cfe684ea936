"""A run from its recipe to its model folder: what is checked before, what happens when, and how it is resumed.

A run's folder holds recipe.yaml (every value), metrics.jsonl, tensorboard/, checkpoints/, best/ (the model that scored
best on the validation split) and, when the run is done, model/.
"""

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from caaseg.config import Architecture, ModelConfig, Recipe
from caaseg.data.catalogue import find, open_dataset
from caaseg.data.joined import JoinedDataset
from caaseg.data.kept import KeptDataset, estimated_bytes
from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.files import written_whole
from caaseg.metrics import ConfusionMatrix
from caaseg.models import Segmenter, load_model
from caaseg.models.weights import check_fits, load_backbone_weights
from caaseg.recipe_files import differences, load_recipe, save_recipe
from caaseg.training import checkpoints
from caaseg.training.journal import Journal
from caaseg.training.memory import check_kept_fits, check_step_fits, too_large
from caaseg.training.module import Outcome, TrainingModule, with_synchronised_statistics
from caaseg.training.schedule import learning_rate

import lightning as L  # isort: skip  # after module, which makes its import possible
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # isort: skip
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment  # isort: skip
from lightning.fabric.utilities.rank_zero import rank_zero_only  # isort: skip

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]

RECIPE = "recipe.yaml"
LOG_EVERY = 10  # steps between two lines of the journal
WITHOUT_IMAGE_LEVEL = ("fcn", "danet")  # heads
# On resume: they change nothing that is learned. A run that stops at bad files has skipped none so far.
MAY_CHANGE = {"data.root", "data.workers", "data.keep", "data.bad_files"}


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


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    device: Device = "auto",
    devices: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Train a model.

    Args:
        recipe: a recipe, the name of a shipped one, or a YAML file.
        out: the run's folder.
        resume: "auto" goes on from the newest good checkpoint in the folder, or starts where there is none; a path
            goes on from that checkpoint.
        init_from: start from the weights of this model (a run, a saved folder or a hub id) instead of random ones; it
            may have another number of classes.
        device: cpu or cuda; auto takes GPUs if there are any.
        devices: how many on this machine. Under torchrun or SLURM these say it.
        progress: told every few steps, on the first rank.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    folder = Path(out)
    on_gpu = _on_gpu(device)
    here, machines = _processes(devices, on_gpu)
    ranks = here * machines
    if recipe.batch_size % (ranks * recipe.accumulate):
        raise ValueError(
            f"batch_size is {recipe.batch_size}; expected a multiple of {ranks * recipe.accumulate}, "
            f"{ranks} processes times {recipe.accumulate} accumulation steps"
        )
    crops = recipe.batch_size // ranks // recipe.accumulate
    synchronised = on_gpu and ranks > 1
    if crops == 1 and not synchronised and recipe.model.head not in WITHOUT_IMAGE_LEVEL:
        raise ValueError(
            f"1 crop is computed at a time, but the image-level branch of head {recipe.model.head} needs 2 or more for "
            "its batch statistics; set a larger batch_size or a smaller accumulate"
        )
    if recipe.precision == "16" and not on_gpu:
        raise ValueError("precision is 16, which needs a GPU; use bf16 or 32 on a CPU")
    if ranks > 1 and not on_gpu and is_first_rank():
        logger.warning("synchronised batch normalisation is not available on CPU: each process has its own statistics")

    state = _state_to_resume(recipe, folder, resume)
    train_data, val_data = open_data(recipe)
    if not on_gpu:
        check_step_fits(recipe, crops, len(train_data.classes))
    model = build_model(recipe, train_data, init_from if state is None else None)
    if synchronised:
        model = with_synchronised_statistics(model)
    start = 0 if state is None else state["step"]
    if recipe.data.keep and start < recipe.steps:
        check_kept_fits(estimated_bytes(train_data) + estimated_bytes(val_data), here)
        train_data, val_data = KeptDataset(train_data), KeptDataset(val_data)
    module = TrainingModule(recipe, model, train_data, val_data, state=state)
    best = {} if state is None else state["best"]
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / RECIPE) as aside:
            save_recipe(recipe, aside)
    conduct = Conductor(recipe, folder, start=start, best=best, progress=progress)
    if start < recipe.steps:
        trainer = _trainer(recipe, on_gpu, here, machines, recipe.steps - start, conduct)
        try:
            with warnings.catch_warnings():
                # Lightning's own use of torch.
                warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
                trainer.fit(module)
        except torch.OutOfMemoryError as error:
            when = f"step {module.step + 1}" if module.ready else "before the first step"
            raise ValueError(too_large(when, recipe, crops)) from error
        finally:
            conduct.close()
            if start == module.step == 0 and is_first_rank():  # the folder is free for another try, by other values
                (folder / RECIPE).unlink(missing_ok=True)
    return conduct.result(module.step if start < recipe.steps else start)


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
            rate = learning_rate(outcome.step - 1, self.recipe.steps, self.recipe.optimiser)
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


def open_data(recipe: Recipe) -> tuple[SegmentationDataset, SegmentationDataset]:
    """The training and the validation split of a recipe, both with samples, and of as many classes as it says."""
    data = recipe.data
    train, val = open_split(recipe, data.train_split), open_split(recipe, data.val_split)
    wanted = recipe.model.num_classes
    for name, dataset in ((data.train_split, train), (data.val_split, val)):
        found = len(dataset.classes)
        if found != (wanted or len(train.classes)):
            raise ValueError(
                f"model.num_classes is {wanted or len(train.classes)}, but split {name} of {data.dataset} has {found} "
                "classes; leave it out to take the data's"
            )
    given = recipe.loss.class_weights
    if not isinstance(given, str) and len(given) != len(train.classes):
        raise ValueError(
            f"loss.class_weights has {len(given)} numbers, but {data.dataset} has {len(train.classes)} classes"
        )
    return train, val


def open_split(recipe: Recipe, names: str) -> SegmentationDataset:
    """A split of a recipe's dataset, or several joined with +, as the recipe's options say."""
    data = recipe.data
    if data.root is None and find(data.dataset).has_files:
        raise ValueError(f"data.root is missing: {data.dataset} needs the folder that its files are in; --data.root")
    root = None if data.root is None else Path(data.root)
    if root is not None and not root.is_dir():
        raise ValueError(
            f"data.root is {root}: no such folder; expected the one that holds {data.dataset}; --data.root"
        )
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in data.options.items()}
    try:
        parts = [open_dataset(data.dataset, root, name, **options) for name in names.split("+")]
    except TypeError as error:  # an option that the dataset does not have
        raise ValueError(f"data.options is {data.options}, which {data.dataset} does not take: {error}") from error
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)


def build_model(recipe: Recipe, data: SegmentationDataset, init_from: str | Path | None = None) -> Segmenter:
    """The network of a recipe for some data, from random weights that its seed decides or from another model's."""
    torch.manual_seed(recipe.seed)
    architecture = {field.name: getattr(recipe.model, field.name) for field in fields(Architecture)}
    config = ModelConfig(
        **architecture, num_classes=len(data.classes), classes=tuple(data.classes), palette=tuple(data.palette)
    )
    pretrained = recipe.model.pretrained
    model = Segmenter(config, hub_weights=pretrained is True and init_from is None)
    if init_from is not None:
        with warnings.catch_warnings(record=True, action="always") as said:
            other = load_model(init_from, num_classes=config.num_classes)
        _check_same_network(model, other, init_from)
        for warning in said:
            logger.warning("%s", warning.message)
        model.load_state_dict(other.state_dict())
    elif not isinstance(pretrained, bool):
        load_backbone_weights(model.backbone, Path(pretrained))
    return model


def _check_same_network(model: Segmenter, other: Segmenter, source: str | Path) -> None:
    """Refuse weights of another network, by what it is: a list of its weights would tell nobody."""
    try:
        check_fits(model, other.state_dict(), str(source))
    except ValueError as error:
        names = [field.name for field in fields(Architecture)]
        two = {name: (getattr(other.config, name), getattr(model.config, name)) for name in names}
        changed = {name: (found, wanted) for name, (found, wanted) in two.items() if found != wanted}
        if not changed:
            raise
        listed = ", ".join(f"{name} {found} instead of {wanted}" for name, (found, wanted) in changed.items())
        raise ValueError(
            f"{source}: its weights do not fit, for it has {listed}; give the same by --model.NAME, or start from "
            "another model"
        ) from error


def _state_to_resume(recipe: Recipe, folder: Path, resume: str | Path | None) -> dict[str, Any] | None:
    written = folder / RECIPE
    if resume is None:
        # Other ranks come here when the first has already begun to write.
        if is_first_rank() and (written.exists() or (folder / checkpoints.FOLDER).exists()):
            raise ValueError(f"{folder}: holds a run; go on with it by --resume auto, or give another folder by --out")
        return None
    if written.exists():
        changed = {key: two for key, two in differences(load_recipe(written), recipe).items() if key not in MAY_CHANGE}
        if changed:
            listed = ", ".join(f"{key} was {old} and is {new}" for key, (old, new) in changed.items())
            raise ValueError(
                f"{written}: the run was begun otherwise: {listed}; give the same values, or another --out"
            )
    if str(resume) == "auto":
        return checkpoints.newest_good_checkpoint(folder)
    return checkpoints.read_checkpoint(Path(resume))


def is_first_rank() -> bool:
    """Whether this process is the one that writes and speaks, of all that train together."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]


def _on_gpu(device: Device) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here; use cpu, or install a CUDA build of torch")
    return device != "cpu" and torch.cuda.is_available()


def _processes(devices: int, on_gpu: bool) -> tuple[int, int]:
    """Processes on this machine, and machines: as torchrun or SLURM say, or else as asked."""
    if devices < 1:
        raise ValueError(f"devices is {devices}; expected 1 or more")
    if TorchElasticEnvironment.detect():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return here, int(os.environ["WORLD_SIZE"]) // here
    if SLURMEnvironment.detect():
        machines = int(os.environ["SLURM_NNODES"])
        return int(os.environ["SLURM_NTASKS"]) // machines, machines
    if on_gpu and devices > torch.cuda.device_count():
        raise ValueError(f"devices is {devices}, but torch sees {torch.cuda.device_count()} GPUs here")
    return devices, 1


def _trainer(recipe: Recipe, on_gpu: bool, here: int, machines: int, steps: int, conductor: Conductor) -> L.Trainer:
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)  # not what it found on this machine
    precision: Any = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}[recipe.precision]
    return L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=here,
        num_nodes=machines,
        strategy="ddp" if here * machines > 1 else "auto",
        # A run is resumed by its own checkpoints: lightning's requeueing would write others.
        plugins=[SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else None,
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        deterministic=recipe.deterministic,
        benchmark=not recipe.deterministic,
        callbacks=[conductor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the loader knows its rank
    )
