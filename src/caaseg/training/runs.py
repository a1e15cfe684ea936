"""A run from its recipe to its model folder: what is checked before, and how it is resumed.

A run's folder holds recipe.yaml (every value), metrics.jsonl, tensorboard/, checkpoints/, best/ (the model that scored
best on the validation split) and, when the run is done, model/.
"""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from caaseg.config import Recipe
from caaseg.data.cache import CachedDataset, estimated_bytes
from caaseg.files import atomic_write
from caaseg.recipes import differences, load_recipe, save_recipe
from caaseg.training import checkpoints
from caaseg.training.conductor import Conductor, Progress, Result
from caaseg.training.memory import check_cache_fits, check_step_fits, too_large
from caaseg.training.module import TrainingModule, with_synchronized_statistics
from caaseg.training.setup import build_model, open_datasets

import lightning as L  # isort: skip  # after module, which makes its import possible
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # isort: skip
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment  # isort: skip
from lightning.fabric.utilities.rank_zero import rank_zero_only  # isort: skip

logger = logging.getLogger(__name__)

Device = str  # auto, cpu, cuda, cuda:N or mps

RECIPE = "recipe.yaml"
WITHOUT_IMAGE_LEVEL = ("fcn", "danet")  # heads
# On resume: they change nothing that is learned. A run that stops at bad files has skipped none so far.
MAY_CHANGE = {"data.root", "data.workers", "data.cache", "data.bad_files"}


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
    if devices > 1 and (":" in device or device == "mps"):
        raise ValueError(f"devices is {devices}, but device is {device}, which is one; use cuda or cpu")
    ranks = here * machines
    if recipe.batch_size % (ranks * recipe.accumulate):
        raise ValueError(
            f"batch_size is {recipe.batch_size}; expected a multiple of {ranks * recipe.accumulate}, "
            f"{ranks} processes times {recipe.accumulate} accumulation steps"
        )
    crops = recipe.batch_size // ranks // recipe.accumulate
    synchronized = on_gpu and ranks > 1
    if crops == 1 and not synchronized and recipe.model.head not in WITHOUT_IMAGE_LEVEL:
        raise ValueError(
            f"1 crop is computed at a time, but the image-level branch of head {recipe.model.head} needs 2 or more for "
            "its batch statistics; set a larger batch_size or a smaller accumulate"
        )
    if recipe.precision == "16" and not on_gpu:
        raise ValueError("precision is 16, which needs a GPU; use bf16 or 32 on a CPU")
    if ranks > 1 and not on_gpu and is_first_rank():
        logger.warning("synchronized batch normalization is not available on CPU: each process has its own statistics")

    state = _state_to_resume(recipe, folder, resume)
    train_data, val_data = open_datasets(recipe)
    if not on_gpu:
        check_step_fits(recipe, crops, len(train_data.classes))
    model = build_model(recipe, train_data, init_from if state is None else None)
    if synchronized:
        model = with_synchronized_statistics(model)
    start = 0 if state is None else state["step"]
    if recipe.data.cache and start < recipe.steps:
        check_cache_fits(estimated_bytes(train_data) + estimated_bytes(val_data), here)
        train_data, val_data = CachedDataset(train_data), CachedDataset(val_data)
    module = TrainingModule(recipe, model, train_data, val_data, state=state)
    best = {} if state is None else state["best"]
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / RECIPE) as aside:
            save_recipe(recipe, aside)
    conduct = Conductor(recipe, folder, start=start, best=best, progress=progress)
    if start < recipe.steps:
        trainer = _trainer(
            recipe, device if on_gpu or device == "mps" else "cpu", here, machines, recipe.steps - start, conduct
        )
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
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, but torch sees no GPU here; use cpu, or install a CUDA build of torch")
    return device not in ("cpu", "mps") and torch.cuda.is_available()


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


def _trainer(recipe: Recipe, device: Device, here: int, machines: int, steps: int, conductor: Conductor) -> L.Trainer:
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)  # not what it found on this machine
    precision: Any = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}[recipe.precision]
    return L.Trainer(
        accelerator=device if device in ("cpu", "mps") else "gpu",
        devices=[int(device.partition(":")[2])] if ":" in device else here,
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
