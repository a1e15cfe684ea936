"""What commands read from the words of an option, and what they say when it is not that."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda"]


def device_of(name: Device) -> "torch.device":
    """The device of that name, refused where there is none."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device is cuda, but torch sees no GPU here; use --device cpu or install a CUDA build of torch"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def words_of(text: str, option: str) -> list[str]:
    """The words of a comma-separated list, one at least."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option} is {text!r}; expected one value or several separated by commas")
    return words


def whole_number(word: str, option: str) -> int:
    """A whole number from 1 to a million."""
    if not word.isdecimal() or not 1 <= int(word) <= 1_000_000:
        raise ValueError(f"{option} has {word!r}; expected a whole number from 1 to a million")
    return int(word)


def factor_of(word: str, option: str) -> float:
    """A number above 0."""
    try:
        factor = float(word)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"{option} has {word!r}; expected a number above 0, such as 0.75")
    return factor


def area_of(text: str, option: str) -> tuple[int, int]:
    """Height and width of 352x480, or of one number for both."""
    parts = text.lower().split("x")
    if len(parts) > 2:
        raise ValueError(f"{option} is {text!r}; expected height x width, such as 352x480, or one number for both")
    height, width = whole_number(parts[0], option), whole_number(parts[-1], option)
    return height, width


def chosen_of(text: str, known: Sequence[Any], option: str) -> list[Any]:
    """The words of a list, each of them known."""
    words = words_of(text, option)
    for word in words:
        if word not in known:
            raise ValueError(f"{option} has {word!r}; expected any of {', '.join(known)}")
    return words


def check_figure(path: Path, option: str) -> None:
    """Refuse a name whose ending says no format."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{option} is {str(path)!r}; expected a name that ends in .png, .svg or .pdf")


def check_writable(**files: str | Path | None) -> None:
    """Refuse, before any work, a place that nothing can be written to."""
    for option, file in files.items():
        if file is not None and file != "-" and (str(file) in ("", ".") or Path(file).is_dir()):
            raise ValueError(f"--{option} is {str(file)!r}; expected the name of a file")
        if file is not None and file != "-":
            _check_permitted(Path(file), f"--{option}")


def check_folder(path: Path, option: str) -> None:
    """Refuse, before any work, a folder's name that is a file's."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, which is a file; expected a folder, there or not")
    _check_permitted(path, option)


def _check_permitted(path: Path, option: str) -> None:
    """Whatever is there of a path must let its rest be made."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK):
        raise ValueError(f"{option} is {str(path)!r}, but {there} may not be written to; give another place")
