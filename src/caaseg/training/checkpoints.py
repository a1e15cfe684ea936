"""Checkpoints: written whole or not at all, read without running code, damaged ones passed over."""

import logging
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from caaseg.files import atomic_write

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
KEPT = 2
NEEDED = {"step", "model", "average", "optimizer", "scaler", "best"}


def write_checkpoint(run: Path, state: dict[str, Any]) -> Path:
    """Write what decides how a run goes on; the last KEPT checkpoints stay."""
    path = run / FOLDER / f"step-{state['step']:08d}.pt"
    for half in path.parent.glob(".step-*.part.pt"):  # what a kill left
        half.unlink()
    with atomic_write(path) as aside:
        torch.save(state, aside)
    for old in _newest_first(run)[KEPT:]:
        old.unlink()
    return path


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU; whatever is wrong with the file is one ValueError."""
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint; expected a file such as RUN/{FOLDER}/step-00000500.pt")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not look at checksums
        if damaged is not None:
            raise ValueError(f"checksum of {damaged} is wrong")
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # on pickles it is about to refuse
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not state.keys() >= NEEDED:
            raise ValueError(f"expected {', '.join(sorted(NEEDED))}")
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, because it holds more than tensors and plain values") from error
    except (ValueError, RuntimeError, EOFError, OSError, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a whole checkpoint ({reason})") from error
    return state


def newest_good_checkpoint(run: Path) -> dict[str, Any] | None:
    """The state of the newest checkpoint that can be read; None where there is none."""
    for path in _newest_first(run):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            logger.warning("%s; the one before is tried", error)
    return None


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint, read or not; 0 where there is none."""
    return max((int(path.stem.removeprefix("step-")) for path in _newest_first(run)), default=0)


def _newest_first(run: Path) -> list[Path]:
    found = [path for path in (run / FOLDER).glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)
