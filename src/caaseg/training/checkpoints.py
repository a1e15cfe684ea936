"""Checkpoints and resuming: written atomically, read without running code, damaged files skipped."""

import logging
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.models import Segmenter
from caaseg.recipes import load_recipe
from caaseg.training.fingerprint import check_same_data
from caaseg.training.optim import make_optimizer
from caaseg.training.run_directory import explain_write_error
from caaseg.training.setup import check_same_architecture, is_first_rank

logger = logging.getLogger(__name__)

DIRECTORY = "checkpoints"
MAX_CHECKPOINTS = 2
RECIPE = "recipe.yaml"
# Settings that may change on resume, because they do not change the weights. This holds for data.bad_files too: a run
# that stops at bad files has not skipped any.
MAY_CHANGE = {"data.root", "data.workers", "data.cache", "data.bad_files", "loggers"}
KEYS: dict[str, Any] = {
    "step": int,
    "model": dict,
    "ema": (dict, NoneType),
    "optimizer": dict,
    "scaler": dict,
    "best": dict,
}


def state_to_resume(recipe: Recipe, run: Path, resume: str | Path | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to resume from and its state, or None to start. Raises CaasegError if settings differ.

    Args:
        recipe: current settings.
        run: the run directory.
        resume: None starts a new run, "auto" resumes from the newest good checkpoint or starts if there is none, and a
            path resumes from that checkpoint.
    """
    path = run / RECIPE
    if resume is None:
        # The other ranks may run this line after the first rank has started to write.
        if is_first_rank() and (path.exists() or (run / DIRECTORY).exists()):
            raise CaasegError(f"{run}: contains a run; resume it with --resume auto, or choose another --out")
        return None
    if path.exists():
        _check_same_settings(path, load_recipe(path), recipe)
    if str(resume) != "auto":
        return Path(resume), read_checkpoint(Path(resume))
    state = newest_good_checkpoint(run)
    if state is None:
        return None
    found = _path(run, state["step"])
    if "recipe" in state:  # not in checkpoints of earlier versions
        _check_same_settings(found, Recipe.read(state["recipe"], f"{found}: "), recipe)
    return found, state


def _check_same_settings(source: Path, before: Recipe, now: Recipe) -> None:
    changed = {
        key: values
        for key, values in before.differences(now).items()
        if key not in MAY_CHANGE or (key == "data.cache" and "device" in values)  # rounds images differently
    }
    if changed:
        listed = ", ".join(f"{key} was {old} and is {new}" for key, (old, new) in changed.items())
        raise CaasegError(f"{source}: the run has different settings: {listed}; use the same, or another --out")


def check_state(
    source: Path, state: dict[str, Any], recipe: Recipe, model: Segmenter, data: dict[str, dict[str, Any]]
) -> None:
    """Raise CaasegError if a checkpoint belongs to another model, optimizer or dataset.

    Checkpoints of earlier versions contain neither fingerprints of their data nor their architecture.

    Args:
        source: path of the checkpoint.
        state: its content.
        recipe: current settings.
        model: the model to train, on the CPU.
        data: fingerprint per split on the first rank; empty on other ranks.
    """
    check_same_architecture(model, state["model"], state.get("config", {}), str(source))
    for split, now in data.items():
        if split in state.get("data", {}):
            check_same_data(state["data"][split], now, split, source)
    if (state["ema"] is None) != (recipe.optimizer.ema is None):
        found = "no EMA weights" if state["ema"] is None else "EMA weights"
        raise CaasegError(f"{source}: has {found}, but optimizer.ema is {recipe.optimizer.ema}; use the same setting")
    try:
        name = _optimizer_name(state["optimizer"]["param_groups"][0])
        if name == recipe.optimizer.name:
            make_optimizer(model, recipe.optimizer).load_state_dict(state["optimizer"])
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise CaasegError(f"{source}: the state of its optimizer does not fit the model ({error})") from error
    if name != recipe.optimizer.name:
        raise CaasegError(
            f"{source}: its optimizer is {name}, but optimizer.name is {recipe.optimizer.name}; use the same"
        )


def _optimizer_name(group: dict[str, Any]) -> str:
    """Return the name of the optimizer of a parameter group, recognized by the settings in the group."""
    if "betas" in group:
        return "adamw" if group.get("decoupled_weight_decay", True) else "adam"
    return "rmsprop" if "alpha" in group else "sgd"


def check_finite(step: int, *models: Segmenter) -> None:
    """Raise CaasegError if a weight or buffer is infinite or NaN."""
    tensors = [pair for model in models for pair in model.state_dict().items() if pair[1].is_floating_point()]
    finite = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist()
    bad = [name for (name, _), is_finite in zip(tensors, finite, strict=True) if not is_finite]
    if bad:
        raise CaasegError(
            f"step {step}: weights are not finite ({bad[0]} and {len(bad) - 1} more tensors), so they are not saved; "
            "lower optimizer.lr, set optimizer.clip_grad_norm or a longer warm-up, and start a new run with another "
            "--out"
        )


def write_checkpoint(run: Path, state: dict[str, Any]) -> Path:
    """Write the state of a run and delete all but the newest MAX_CHECKPOINTS checkpoints."""
    path = _path(run, state["step"])
    for temporary in path.parent.glob(".step-*.part.pt"):  # of killed processes
        temporary.unlink()
    with explain_write_error(run, f"{DIRECTORY}/{path.name}"), atomic_write(path) as temporary:
        torch.save(state, temporary)
    for old in _newest_first(run)[MAX_CHECKPOINTS:]:
        old.unlink()
    return path


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, on the CPU. Raises CaasegError if the file cannot be used."""
    if not path.is_file():
        raise CaasegError(f"{path}: no such checkpoint; expected a file such as RUN/{DIRECTORY}/step-00000500.pt")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not check checksums
        if damaged is not None:
            raise ValueError(f"checksum of {damaged} is wrong")
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about pickles that it then refuses
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(state.get(key, ...), kind) for key, kind in KEYS.items()):
            raise ValueError(f"expected {', '.join(sorted(KEYS))}")
        if not all(isinstance(tensor, Tensor) for part in ("model", "ema") for tensor in (state[part] or {}).values()):
            raise ValueError("expected tensors as weights")
        if state["best"] and not all(isinstance(state["best"].get(key), int | float) for key in ("step", "mean_iou")):
            raise ValueError("expected the best step and its mean_iou")
        data = state.get("data", {})
        described = [state.get("config", {}), data, *(data.values() if isinstance(data, dict) else ())]
        if not all(isinstance(part, dict) for part in described):
            raise ValueError("expected dictionaries as config and data")
    except PermissionError:
        raise  # the file is not damaged, so an earlier checkpoint would not help
    except pickle.UnpicklingError as error:
        raise CaasegError(f"{path}: refused, because it contains more than tensors and plain values") from error
    except (ValueError, RuntimeError, EOFError, OSError, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(f"{path}: not a complete checkpoint ({reason})") from error
    return state


def newest_good_checkpoint(run: Path) -> dict[str, Any] | None:
    """Return the state of the newest readable checkpoint, or None if there is none."""
    for path in _newest_first(run):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            logger.warning("%s; falling back to the previous checkpoint", error)
    return None


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint, readable or not; 0 if there is none."""
    return max((int(path.stem.removeprefix("step-")) for path in _newest_first(run)), default=0)


def _path(run: Path, step: int) -> Path:
    return run / DIRECTORY / f"step-{step:08d}.pt"


def _newest_first(run: Path) -> list[Path]:
    found = [path for path in (run / DIRECTORY).glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)
