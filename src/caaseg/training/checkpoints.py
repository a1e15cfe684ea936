"""Checkpoints and resuming: written atomically, read without running code, damaged files skipped."""

import logging
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.recipes import differences, load_recipe
from caaseg.training.setup import is_first_rank

logger = logging.getLogger(__name__)

DIRECTORY = "checkpoints"
MAX_CHECKPOINTS = 2
RECIPE = "recipe.yaml"
# Values that may differ on resume: they do not change the weights. A run that stops at bad files has skipped none.
MAY_CHANGE = {"data.root", "data.workers", "data.cache", "data.bad_files"}
KEYS = {"step", "model", "ema", "optimizer", "scaler", "best"}


def state_to_resume(recipe: Recipe, run: Path, resume: str | Path | None) -> dict[str, Any] | None:
    """Return the state to resume from, None to start. Raises CaasegError if the run has other settings.

    Args:
        recipe: the settings now.
        run: the run directory.
        resume: None starts a new run, "auto" resumes from the newest good checkpoint or starts if there is none, and a
            path resumes from that checkpoint.
    """
    path = run / RECIPE
    if resume is None:
        # Other ranks get here after the first has started to write.
        if is_first_rank() and (path.exists() or (run / DIRECTORY).exists()):
            raise CaasegError(f"{run}: contains a run; resume it with --resume auto, or choose another --out")
        return None
    if path.exists():
        changed = {key: two for key, two in differences(load_recipe(path), recipe).items() if key not in MAY_CHANGE}
        if changed:
            listed = ", ".join(f"{key} was {old} and is {new}" for key, (old, new) in changed.items())
            raise CaasegError(f"{path}: the run has different settings: {listed}; use the same, or another --out")
    if str(resume) == "auto":
        return newest_good_checkpoint(run)
    return read_checkpoint(Path(resume))


def write_checkpoint(run: Path, state: dict[str, Any]) -> Path:
    """Write the state of a run and delete all but the newest MAX_CHECKPOINTS checkpoints."""
    path = run / DIRECTORY / f"step-{state['step']:08d}.pt"
    for temporary in path.parent.glob(".step-*.part.pt"):  # left by a kill
        temporary.unlink()
    with atomic_write(path) as temporary:
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
        if not isinstance(state, dict) or not state.keys() >= KEYS:
            raise ValueError(f"expected {', '.join(sorted(KEYS))}")
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


def _newest_first(run: Path) -> list[Path]:
    found = [path for path in (run / DIRECTORY).glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)
