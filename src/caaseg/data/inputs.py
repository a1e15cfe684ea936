"""Expand command-line inputs (files, directories, glob patterns) to images and videos with unique result names."""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES

VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv", ".ogv", ".flv")
SUFFIXES = IMAGE_SUFFIXES + VIDEO_SUFFIXES


class InputImage(NamedTuple):
    """An image or video file to predict."""

    path: Path  # one of the inputs, or a path below an input directory
    name: Path  # unique name of its results: the path relative to the common directory of all inputs


class Inputs(NamedTuple):
    """Images found for all inputs."""

    images: list[InputImage]
    errors: list[str]  # one message per input without images or videos, and per directory that cannot be listed
    skipped: int  # number of files in directories with another suffix


def find_images(inputs: Sequence[str], *, exclude: Sequence[Path] = ()) -> Inputs:
    """List the images and videos of files, directories (recursively) and glob patterns such as photos/*.jpg.

    Names keep the subdirectories below the common directory of all inputs. They lose their suffix unless two files
    would then have the same name. In directories, hidden files and files with another suffix are skipped.

    Args:
        inputs: file names, directories and patterns; the name of an existing file is never treated as a pattern.
        exclude: directories to skip, such as output directories.
    """
    found: dict[str, Path] = {}  # by absolute path, so that an image named twice is listed once
    bases: list[str] = []
    errors: list[str] = []
    others: set[str] = set()
    for text in inputs:
        input_path = Path(text)
        is_pattern = glob.has_magic(text) and not os.path.lexists(text)
        directory = input_path if input_path.is_dir() else input_path.parent
        base = _before_pattern(input_path) if is_pattern else directory
        bases.append(_absolute(base))
        files: list[Path] = []
        for path in sorted(base.glob(str(input_path.relative_to(base)))) if is_pattern else [input_path]:
            if path.is_dir():
                below = list(_walk(path, exclude, errors))
                files += [file for file in below if file.suffix.lower() in SUFFIXES]
                others |= {_absolute(file) for file in below if file.suffix.lower() not in SUFFIXES}
            elif not (is_pattern and path.name.startswith(".")):
                files.append(path)
        if not files:
            problem = "no file matches" if is_pattern else "no images in this directory"
            errors.append(f"{text}: {problem}; expected files that end in {', '.join(SUFFIXES)}")
        for file in files:
            found.setdefault(_absolute(file), file)
    root = os.path.commonpath(bases)
    relative = {Path(os.path.relpath(path, root)): file for path, file in found.items()}
    return Inputs(_with_names(relative), errors, len(others))


def _with_names(files: dict[Path, Path]) -> list[InputImage]:
    stems = Counter(relative.with_suffix("") for relative in files)
    images = []
    for relative, path in files.items():
        stem = relative.with_suffix("")
        ambiguous = stems[stem] > 1 or stem in files
        dots_only = not relative.stem.strip(".")  # a file such as ..png would lose its whole name
        images.append(InputImage(path, relative if ambiguous or dots_only else stem))
    return images


def _walk(directory: Path, exclude: Sequence[Path], errors: list[str]) -> Iterator[Path]:
    """Yield all files that are not hidden, sorted. Links to directories are not followed: they may be cyclic."""
    excluded = {_absolute(path) for path in exclude}

    def on_error(error: OSError) -> None:
        errors.append(f"{error.filename}: the directory cannot be listed ({error.strerror}); its images are skipped")

    for parent, directories, files in os.walk(directory, onerror=on_error):
        visible = (name for name in directories if not name.startswith("."))
        directories[:] = sorted(name for name in visible if _absolute(Path(parent, name)) not in excluded)
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def _before_pattern(path: Path) -> Path:
    """Return the directories of a pattern before its first wildcard."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))


def _absolute(path: Path) -> str:
    """Return an absolute path without following links: a link has its own name and location."""
    return os.path.normpath(path.absolute())
