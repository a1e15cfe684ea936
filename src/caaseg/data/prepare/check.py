"""Check a dataset by reading every file: missing, damaged or mismatched files, and pixel counts per class."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.catalogue import find, splits
from caaseg.data.datasets.pairs import IMAGE_SUFFIXES, Pair, PairDataset, size_error
from caaseg.data.decode import read_image
from caaseg.data.prepare import Progress
from caaseg.data.sample import IGNORE, BadFileError
from caaseg.errors import CaasegError


class Problem(NamedTuple):
    """A file or split that cannot be used."""

    split: str
    file: Path
    message: str  # complete, including the name of the file


@dataclass
class SplitSummary:
    """Contents of one split."""

    split: str
    images: int
    expected: int | None  # official number of images, if there is one
    pixels: NDArray[np.int64]  # (K,) pixels per class in pairs without a problem
    ignored: int = 0


@dataclass
class CheckResult:
    """Contents and problems of a dataset."""

    name: str
    root: Path
    classes: tuple[str, ...] = ()
    splits: list[SplitSummary] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def check(name: str, root: Path, progress: Progress) -> CheckResult:
    """Read all pairs of all splits and collect every problem. A pair in several splits is read once."""
    info, result = find(name), CheckResult(name, root)
    opened: dict[str, PairDataset] = {}
    for split in splits(name, root):
        try:
            dataset = info.open(root, split)
        except BadFileError as error:
            messages: tuple[str, ...] = (str(error),)
        else:
            if not isinstance(dataset, PairDataset):
                raise CaasegError(f"{name} has no files to check")
            opened[split] = dataset
            messages = dataset.problems
        known = {problem.message for problem in result.problems}  # several splits may have the same problem
        result.problems += [Problem(split, root, message) for message in messages if message not in known]
    splits_of: dict[Pair, list[str]] = {}
    for split, dataset in opened.items():
        for pair in dataset.pairs:
            splits_of.setdefault(pair, []).append(split)
    counts = {split: np.zeros(256, dtype=np.int64) for split in opened}
    readers = [opened[names[0]] for names in splits_of.values()]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # decoders release the GIL
        checked = zip(splits_of.values(), threads.map(_check_pair, splits_of, readers), strict=True)
        for done, (names, (problems, pixels)) in enumerate(checked, start=1):
            result.problems += [Problem(names[0], file, message) for file, message in problems]
            for split in names:
                counts[split] += pixels
            progress(f"checking {name}", done, len(splits_of))
    for split, dataset in opened.items():
        result.classes = dataset.classes
        expected = info.counts.get(split)
        if expected is not None and expected != len(dataset):
            message = f"{root}: {len(dataset)} images in split {split}; expected {expected}, the official number"
            result.problems.append(Problem(split, root, message))
        pixels_per_class, ignored = counts[split][: len(dataset.classes)], int(counts[split][IGNORE])
        if ignored and not pixels_per_class.any():
            message = f"{root}: split {split} has no labeled pixel: all are ignored; check the masks and their classes"
            result.problems.append(Problem(split, root, message))
        result.splits.append(SplitSummary(split, len(dataset), expected, pixels_per_class, ignored))
    for split, file in _unused_files(opened):
        message = (
            f"{file}: is not used in any split; expected an image and a mask of the same name; add the missing file, "
            "or move this one"
        )
        result.problems.append(Problem(split, file, message))
    return result


def _check_pair(pair: Pair, dataset: PairDataset) -> tuple[list[tuple[Path, str]], NDArray[np.int64]]:
    """Return the problems of a pair, each with its file, and the pixels per label value, (256,)."""
    problems: list[tuple[Path, str]] = []
    image = label = None
    try:
        image = read_image(pair.image)
    except BadFileError as error:
        problems.append((pair.image, str(error)))
    if pair.label is not None:
        try:
            label = dataset.read_label(pair.label)
        except BadFileError as error:
            problems.append((pair.label, str(error)))
        if image is not None and label is not None and image.shape[1:] != label.shape:
            problems.append((pair.label, str(size_error(pair, tuple(image.shape[1:]), label.shape))))
    if label is None or problems:
        return problems, np.zeros(256, dtype=np.int64)
    return problems, np.bincount(label.ravel(), minlength=256)


def _unused_files(opened: dict[str, PairDataset]) -> Iterator[tuple[str, Path]]:
    """Yield image files in the dataset's directories that belong to no pair of any split."""
    known = {path for dataset in opened.values() for pair in dataset.pairs for path in (pair.image, pair.label)}
    for split, dataset in opened.items():
        for directory, pattern in dataset.file_globs:
            for path in sorted(directory.glob(pattern)):
                is_hidden = any(part.startswith(".") for part in path.parts[-2:])
                if path.suffix.lower() in IMAGE_SUFFIXES and not is_hidden and path not in known:
                    known.add(path)
                    yield split, path
