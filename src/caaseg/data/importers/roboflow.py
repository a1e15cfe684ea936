"""Roboflow's semantic masks: NAME.jpg and NAME_mask.png in a directory per split, with the classes in _classes.csv."""

import csv
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES
from caaseg.data.importers.export import Drawing, Export, LabeledImage, sample_name, split_of
from caaseg.data.labels import LabelTable
from caaseg.data.sample import BadFileError

CLASSES = "_classes.csv"


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read a directory with _classes.csv in it or in its subdirectories. None if there is none."""
    files = [*path.glob(CLASSES), *sorted(path.glob(f"*/{CLASSES}"))]
    directories = [file.parent for file in files if file.is_file()]
    if not directories:
        return None
    tables = [_classes(directory / CLASSES) for directory in directories]
    if any(table != tables[0] for table in tables):
        raise BadFileError(f"{path}: the files {CLASSES} differ; expected the same classes in each split")
    ids = {value: k for k, value in enumerate(tables[0])}
    table = LabelTable(ids, advice=f"correct the mask, or add the value to {CLASSES}")
    found = []
    for directory in directories:
        split = split_of(directory.name) if directory != path else ""
        for image in sorted(directory.iterdir()):
            if image.suffix.lower() not in IMAGE_SUFFIXES or image.stem.endswith("_mask"):
                continue
            mask = image.with_name(f"{image.stem}_mask.png")
            found.append(LabeledImage(sample_name(split, image), image, partial(_read, table, mask)))
    return Export("Roboflow masks", tuple(tables[0].values()), found)


def _classes(file: Path) -> dict[int, str]:
    """Return the class name of each mask value."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
        return {int(row[0]): row[1] for row in rows[1:]}
    except (OSError, ValueError, IndexError) as error:
        raise BadFileError(f"{file}: cannot be read ({error}); expected lines such as 1, road; export again") from error


def _read(table: LabelTable, mask: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    return table.read(mask)
