"""Base class of datasets that consist of image files and label files."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caaseg.data.decode import read_image
from caaseg.data.sample import IGNORE, BadFileError, Color, Sample
from caaseg.errors import CaasegError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm")
MASK_SUFFIXES = (".png", ".bmp", ".tif", ".tiff")


class Pair(NamedTuple):
    """Paths of one sample; the files may be missing."""

    name: str
    image: Path
    label: Path | None  # None in splits without labels


class PairDataset:
    """Images and label files, listed when the dataset is opened and read one pair at a time.

    Args:
        pairs: files of the split.
        classes: name of class id k at position k.
        palette: color of class id k at position k.
        read_label: reads the class ids of a label file, (H, W).
        file_globs: directories with a glob pattern; every matching file should belong to a pair of some split.
        problems: error messages about the split as a whole; `open_dataset` refuses a split that has any.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    def __init__(
        self,
        pairs: Iterable[Pair],
        *,
        classes: tuple[str, ...],
        palette: tuple[Color, ...],
        read_label: Callable[[Path], NDArray[np.uint8]],
        file_globs: Iterable[tuple[Path, str]] = (),
        problems: Iterable[str] = (),
    ) -> None:
        self.pairs = list(pairs)
        self.classes = classes
        self.palette = palette
        self.read_label = read_label
        self.file_globs = tuple(file_globs)
        self.problems = tuple(problems)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        pair = self.pairs[index]
        image = read_image(pair.image)
        size = image.shape[1:]
        if pair.label is None:
            return Sample(image, torch.full(size, IGNORE, dtype=torch.uint8), pair.name)
        label = torch.from_numpy(self.read_label(pair.label))
        if label.shape != size:
            raise size_error(pair, tuple(size), tuple(label.shape))
        return Sample(image, label, pair.name)

    def missing(self) -> list[Path]:
        """Return the files of this split that do not exist, listing each directory once."""
        present: dict[Path, set[str]] = {}
        missing = []
        for path in (path for pair in self.pairs for path in (pair.image, pair.label) if path is not None):
            if path.parent not in present:
                present[path.parent] = file_names(path.parent)
            if path.name not in present[path.parent]:
                missing.append(path)
        return missing


def size_error(pair: Pair, image: tuple[int, ...], label: tuple[int, ...]) -> BadFileError:
    """Return the error of an image and a mask of different sizes (H, W)."""
    return BadFileError(
        f"{pair.label}: the mask is {label[1]} x {label[0]} and its image {pair.image.name} {image[1]} x {image[0]}; "
        "expected the same width and height; replace or resize one of them"
    )


def check_split(dataset: str, split: str, known: Iterable[str]) -> None:
    """Raise CaasegError if a dataset does not have a split."""
    known = tuple(known)
    if split not in known:
        raise CaasegError(f"{dataset} has no split {split!r}; expected {' or '.join(known)}")


def read_names(path: Path, advice: str) -> list[str]:
    """Read a list of names, one per line; `advice` says what to do if the file is missing."""
    try:
        text = path.read_text(encoding="utf-8")
        if "\0" in text:
            raise ValueError("it has a null byte, which no file name has")
    except FileNotFoundError:
        raise BadFileError(f"{path}: no such file; expected the split's list of names; {advice}") from None
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path}: cannot be read as a list of names ({error}); {advice}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def file_names(directory: Path) -> set[str]:
    """Return the names of all entries of a directory; an empty set if it does not exist."""
    try:
        return {path.name for path in directory.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def files_by_stem(directory: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of a directory with these suffixes by stem; two files with one stem are an error."""
    found: dict[str, Path] = {}
    for name in sorted(file_names(directory)):
        path = directory / name
        if path.suffix.lower() not in suffixes or name.startswith("."):
            continue
        if path.stem in found:
            raise BadFileError(
                f"{path}: {found[path.stem].name} has the same name; expected one file per name; rename one"
            )
        found[path.stem] = path
    return found
