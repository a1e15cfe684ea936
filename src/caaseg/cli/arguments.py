"""Types of command-line arguments, and checks of paths before any work. Does not import torch."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import AfterValidator, Field

from caaseg.config import Size
from caaseg.errors import CaasegError

if TYPE_CHECKING:
    import torch


def _checked_device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ValueError("auto, cpu, cuda, cuda:N, mps")
    return name


def _checked_figure(path: Path) -> Path:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError("a file name that ends in .png, .svg or .pdf")
    return path


ImageSize = Literal["auto", "native"] | Annotated[int, Field(ge=1)] | Size
Device = Annotated[str, AfterValidator(_checked_device)]
Figure = Annotated[Path, AfterValidator(_checked_figure)]
Positive = Annotated[float, Field(gt=0)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]
Scales = Annotated[tuple[Positive, ...], Field(min_length=1)]
RESULT_SUFFIXES = (".json", ".html")
MODEL_FILES = ("config.json", "predict.json")
Overrides = Annotated[Sequence[str], tyro.conf.Suppress]  # the help shows the options of a recipe instead


def device_of(name: str) -> "torch.device":
    """Return the device of a name, or raise an error if this machine does not have it."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CaasegError(
            f"--device is {name}, but torch sees no GPU here; use --device cpu or install a CUDA build of torch"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CaasegError(f"--device is {name}, but there are {torch.cuda.device_count()} GPUs, numbered from 0")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise CaasegError("--device is mps, but torch cannot use it here; use --device cpu")
    return device


def check_writable(inputs: Iterable[str | Path | None] = (), **files: str | Path | None) -> None:
    """Raise an error if a file cannot be written, or is one of the inputs.

    Args:
        inputs: files and directories that the command reads. Files in them may be replaced if they are results of an
            earlier command, which end in .json or .html.
        files: names of options and their values; "-" is standard output.
    """
    read = [Path(path).resolve() for path in inputs if path is not None and Path(path).exists()]
    for option, file in files.items():
        if file is not None and file != "-":
            path = Path(file)
            if str(file) in ("", ".") or path.is_dir():
                raise CaasegError(f"--{option} is {str(file)!r}; expected the name of a file")
            is_result = path.suffix in RESULT_SUFFIXES and path.name not in MODEL_FILES
            inside = any(path.resolve().is_relative_to(one) for one in read)
            if path.exists() and (path.resolve() in read or (inside and not is_result)):
                raise CaasegError(f"--{option} is {str(file)!r}, which the command reads; choose another name")
            _check_permission(path, f"--{option}")


def check_directory(path: Path, option: str) -> None:
    """Raise an error if a directory cannot be created or written to."""
    if path.exists() and not path.is_dir():
        raise CaasegError(f"{option} is {str(path)!r}, which is a file; expected a new or existing directory")
    _check_permission(path, option)


def _check_permission(path: Path, option: str) -> None:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise CaasegError(f"{option} is {str(path)!r}, but {existing} is not writable; choose another path")
