"""A dataset of files: images and their label files, listed when it is opened, read one pair at a time."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caaseg.data.decode import read_image
from caaseg.data.sample import IGNORE, BadFileError, Color, Sample

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm")
MASK_SUFFIXES = (".png", ".bmp", ".tif", ".tiff")


class Pair(NamedTuple):
    """Where one sample's files are, or would be."""

    name: str
    image: Path
    label: Path | None  # None where a split has no labels


class PairDataset:
    """Images beside label files. A dataset says where they are and what its label files mean; the rest is here."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    def __init__(
        self,
        pairs: Iterable[Pair],
        *,
        classes: tuple[str, ...],
        palette: tuple[Color, ...],
        read_label: Callable[[Path], NDArray[np.uint8]],
        owned: Iterable[tuple[Path, str]] = (),
        faults: Iterable[str] = (),
    ) -> None:
        """Keep what was listed.

        Args:
            pairs: the split's files.
            classes: the name of class id k at position k.
            palette: its color.
            read_label: class ids, (H, W), out of a label file.
            owned: folders, each with a pattern, whose every file should be in some split's pairs.
            faults: what is wrong with the split as a whole; it is neither learned from nor scored on until put right.
        """
        self.pairs = list(pairs)
        self.classes = classes
        self.palette = palette
        self.read_label = read_label
        self.owned = tuple(owned)
        self.faults = tuple(faults)

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
        """Files of this split that are not there, found without opening any."""
        present: dict[Path, set[str]] = {}
        absent = []
        for pair in self.pairs:
            for path in (pair.image, pair.label):
                if path is None:
                    continue
                if path.parent not in present:
                    present[path.parent] = names_in(path.parent)
                if path.name not in present[path.parent]:
                    absent.append(path)
        return absent


def size_error(pair: Pair, image: tuple[int, ...], label: tuple[int, ...]) -> BadFileError:
    """An image and a mask that cannot lie on each other; sizes are (H, W)."""
    return BadFileError(
        f"{pair.label}: the mask is {label[1]} x {label[0]} and its image {pair.image.name} {image[1]} x {image[0]}; "
        "expected the same width and height; pair or resize them again"
    )


def check_split(dataset: str, split: str, known: Iterable[str]) -> None:
    """Refuse a split that a dataset does not have."""
    known = tuple(known)
    if split not in known:
        raise ValueError(f"{dataset} has no split {split!r}; expected {' or '.join(known)}")


def read_names(path: Path, how: str) -> list[str]:
    """The lines of a list of names; `how` says what to do when it is not there."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise BadFileError(f"{path}: no such file; expected the split's list of names; {how}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"{path}: cannot be read as a list of names ({error}); {how}") from error
    return [line.strip() for line in lines if line.strip()]


def names_in(folder: Path) -> set[str]:
    """The names in a folder; none where there is no such folder."""
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The files of a folder with these endings, by name without ending; two of one name are an error."""
    found: dict[str, Path] = {}
    for name in sorted(names_in(folder)):
        path = folder / name
        if path.suffix.lower() not in suffixes or name.startswith("."):
            continue
        if path.stem in found:
            raise BadFileError(
                f"{path}: {found[path.stem].name} has the same name; expected one file a name; remove one"
            )
        found[path.stem] = path
    return found
