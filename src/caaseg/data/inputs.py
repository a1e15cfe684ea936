"""From words of a command line (files, folders, patterns) to pictures, each with a name that no other has."""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES


class Picture(NamedTuple):
    """An image file to look at."""

    path: Path  # as it was given, or found below what was given
    name: Path  # what its results are called: its place below the folder that holds all inputs


class Inputs(NamedTuple):
    """What was found."""

    pictures: list[Picture]
    faults: list[str]  # a message for each word or folder that gave nothing
    left_out: int  # files in folders that do not end as images do


def find_pictures(words: Sequence[str], *, apart_from: Sequence[Path] = ()) -> Inputs:
    """List the pictures that files, folders (with all below them) and patterns such as photos/*.jpg stand for.

    Names keep the folders below the deepest folder that holds all inputs, and lose their ending unless another file
    would then be called the same. In folders, hidden files and what does not end as images do are left out.

    Args:
        words: what was asked for; a word that names an existing file is that file, whatever characters it has.
        apart_from: folders not to look into, such as those that results go to.
    """
    found: dict[str, Path] = {}  # by absolute path: what is asked for twice is one picture
    bases: list[str] = []
    faults: list[str] = []
    others: set[str] = set()
    for word in words:
        given = Path(word)
        pattern = glob.has_magic(word) and not os.path.lexists(word)
        base = _before_pattern(given) if pattern else given if given.is_dir() else given.parent
        bases.append(_absolute(base))
        paths = sorted(base.glob(str(given.relative_to(base)))) if pattern else [given]
        files: list[Path] = []
        for path in paths:
            if path.is_dir():
                below = list(_below(path, apart_from, faults))
                files += [file for file in below if file.suffix.lower() in IMAGE_SUFFIXES]
                others |= {_absolute(file) for file in below if file.suffix.lower() not in IMAGE_SUFFIXES}
            elif not (pattern and path.name.startswith(".")):
                files.append(path)
        if not files:
            found_instead = "no file matches" if pattern else "no images in this folder"
            faults.append(f"{word}: {found_instead}; expected files that end in {', '.join(IMAGE_SUFFIXES)}")
        for file in files:
            found.setdefault(_absolute(file), file)
    root = os.path.commonpath(bases)
    places = {Path(os.path.relpath(path, root)): file for path, file in found.items()}
    return Inputs(_named(places), faults, len(others))


def _named(files: dict[Path, Path]) -> list[Picture]:
    stems = Counter(place.with_suffix("") for place in files)
    pictures = []
    for place, path in files.items():
        stem = place.with_suffix("")
        shared = stems[stem] > 1 or stem in files
        bare = not place.stem.strip(".")  # of a file such as ..png nothing would be left
        pictures.append(Picture(path, place if shared or bare else stem))
    return pictures


def _below(folder: Path, apart_from: Sequence[Path], faults: list[str]) -> Iterator[Path]:
    """Every file that is not hidden, in the order of names. Links to folders are not followed: they may lead back."""
    excluded = {_absolute(path) for path in apart_from}

    def blame(error: OSError) -> None:
        faults.append(f"{error.filename}: the folder cannot be listed ({error.strerror}); its images are left out")

    for parent, folders, files in os.walk(folder, onerror=blame):
        kept = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(name for name in kept if _absolute(Path(parent, name)) not in excluded)
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def _before_pattern(path: Path) -> Path:
    """The folders of a pattern before its first wildcard."""
    plain: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        plain.append(part)
    return Path(*plain)


def _absolute(path: Path) -> str:
    """Links are not followed: a link has a name and a place of its own."""
    return os.path.normpath(path.absolute())
