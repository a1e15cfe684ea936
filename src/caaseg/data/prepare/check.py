"""Every file of a dataset opened before a training does it: what is missing, damaged or does not fit, by name."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.catalogue import find, splits
from caaseg.data.datasets.pairs import IMAGE_SUFFIXES, Pair, PairDataset, size_error
from caaseg.data.decode import read_image
from caaseg.data.prepare.convert import Report
from caaseg.data.sample import IGNORE, BadFileError


class Fault(NamedTuple):
    """Something wrong."""

    split: str
    file: Path
    problem: str  # a whole message, the file's name included


@dataclass
class SplitFindings:
    """What one split holds."""

    split: str
    images: int
    expected: int | None  # the official number, where there is one
    pixels: NDArray[np.int64]  # (classes,): of each class, in labels without fault
    ignored: int = 0


@dataclass
class Findings:
    """What a dataset holds, and what is wrong with it."""

    name: str
    root: Path
    classes: tuple[str, ...] = ()
    splits: list[SplitFindings] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def check(name: str, root: Path, report: Report) -> Findings:
    """Read all pairs of all splits. A fault never ends it: all of them are in what it returns."""
    entry, findings = find(name), Findings(name, root)
    opened: dict[str, PairDataset] = {}
    for split in splits(name, root):
        try:
            dataset = entry.open(root, split)
        except BadFileError as error:
            if all(fault.problem != str(error) for fault in findings.faults):  # one file may spoil all splits
                findings.faults.append(Fault(split, root, str(error)))
            continue
        if not isinstance(dataset, PairDataset):
            raise ValueError(f"{name} has no files to check")
        opened[split] = dataset
        said = {fault.problem for fault in findings.faults}  # two splits may share a fault
        findings.faults += [Fault(split, root, problem) for problem in dataset.faults if problem not in said]
    total = sum(len(dataset) for dataset in opened.values())
    done = 0
    for split, dataset in opened.items():
        findings.classes = dataset.classes
        counted = np.zeros(256, dtype=np.int64)
        for faults, pixels in _checked(dataset):
            findings.faults += [Fault(split, file, problem) for file, problem in faults]
            counted += pixels
            done += 1
            report(f"checking {name}", done, total)
        expected = entry.counts.get(split)
        if expected is not None and expected != len(dataset):
            problem = f"{root}: {len(dataset)} images in split {split}; expected {expected}, the official number"
            findings.faults.append(Fault(split, root, problem))
        findings.splits.append(
            SplitFindings(split, len(dataset), expected, counted[: len(dataset.classes)], int(counted[IGNORE]))
        )
    findings.faults += [
        Fault(split, file, f"{file}: belongs to no pair; expected a partner of the same name, in a split; remove it")
        for split, file in _strays(opened)
    ]
    return findings


Checked = tuple[list[tuple[Path, str]], NDArray[np.int64]]


def _checked(dataset: PairDataset) -> Iterator[Checked]:
    """Faults and pixel counts of each pair. Threads do: the decoders let each other run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda pair: _check(pair, dataset), dataset.pairs)


def _check(pair: Pair, dataset: PairDataset) -> Checked:
    faults: list[tuple[Path, str]] = []
    pixels = np.zeros(256, dtype=np.int64)
    image = label = None
    try:
        image = read_image(pair.image)
    except BadFileError as error:
        faults.append((pair.image, str(error)))
    if pair.label is not None:
        try:
            label = dataset.read_label(pair.label)
        except BadFileError as error:
            faults.append((pair.label, str(error)))
    if image is not None and label is not None and image.shape[1:] != label.shape:
        assert pair.label is not None
        faults.append((pair.label, str(size_error(pair, tuple(image.shape[1:]), label.shape))))
    elif label is not None:
        pixels += np.bincount(label.ravel(), minlength=256)
    return faults, pixels


def _strays(opened: dict[str, PairDataset]) -> Iterator[tuple[str, Path]]:
    """Files in the datasets' folders that no split's pair has."""
    used = {path for dataset in opened.values() for pair in dataset.pairs for path in (pair.image, pair.label)}
    seen: set[Path] = set()
    for split, dataset in opened.items():
        for place, pattern in dataset.owned:
            for path in _pictures(sorted(place.glob(pattern))):
                if path not in used and path not in seen:
                    seen.add(path)
                    yield split, path


def _pictures(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.suffix.lower() in IMAGE_SUFFIXES and not any(part.startswith(".") for part in path.parts[-2:]):
            yield path
