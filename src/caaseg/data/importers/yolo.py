"""YOLO segmentation: a text file per image, with a class number and a polygon in fractions of the image per line."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES
from caaseg.data.importers.export import Drawing, Export, LabeledImage, sample_name, split_of
from caaseg.data.importers.shapes import Points, Region, polygon_mask
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from caaseg.files import read_yaml


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read a directory with a YAML file of names and directories images/ and labels/. None for other formats."""
    if path.is_file():
        path = path.parent if path.suffix.lower() in (".yaml", ".yml") else path
    table = next((file for file in sorted(path.glob("*.y*ml")) if _names(file) is not None), None)
    lists = [file for file in path.rglob("*.txt") if "labels" in (file.parent.name, file.parent.parent.name)]
    if table is None or not lists:
        return None
    names = _names(table) or []
    classes = drawing.classes(names)
    found = []
    for image in _images(images or path):
        labels = _label_file(image)
        split = split_of(*image.relative_to(images or path).parent.parts)
        regions = list(_regions(labels, names)) if labels.is_file() else []
        label = drawing.label(regions, classes, default="order")
        found.append(LabeledImage(sample_name(split, image), image, label, annotated=bool(regions)))
    if not found:
        raise BadFileError(f"{path}: labels but no images; expected images/ beside labels/; give it with --images")
    return Export("YOLO polygons", classes, found)


def _names(file: Path) -> list[str] | None:
    """Return the class names of a YAML file by number; None if it has none."""
    try:
        content = read_yaml(file, "export the labels again")
    except CaasegError:
        return None
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict) and sorted(names) == list(range(len(names))):
        names = [names[k] for k in range(len(names))]
    return [str(name) for name in names] if isinstance(names, list) else None


def _images(root: Path) -> Iterator[Path]:
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in IMAGE_SUFFIXES and "labels" not in file.parts:
            yield file


def _label_file(image: Path) -> Path:
    """Return the label file of an image: the last images/ of its path becomes labels/."""
    parts = list(image.with_suffix(".txt").parts)
    for k in reversed(range(len(parts) - 1)):
        if parts[k] == "images":
            parts[k] = "labels"
            break
    return Path(*parts)


def _regions(file: Path, names: list[str]) -> Iterator[Region]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        source = f"{file}: line {number}"
        try:
            numbers = [float(part) for part in line.split()]
        except ValueError as error:
            raise BadFileError(f"{source}: {error}; expected a class number and coordinates") from error
        if not numbers:
            continue
        is_known = numbers[0] in range(len(names))
        points = list(zip(numbers[1::2], numbers[2::2], strict=False))
        is_complete = len(numbers) % 2 == 1
        name = names[int(numbers[0])] if is_known else f"{numbers[0]:g} (data.yaml has 0 to {len(names) - 1})"
        yield Region(name, source, partial(_mask, points if is_complete else []))


def _mask(points: Points, height: int, width: int) -> NDArray[np.bool_]:
    if len(points) < 3:
        raise ValueError("a bounding box or an incomplete polygon; expected at least three points")
    return polygon_mask([(x * width, y * height) for x, y in points], height, width)
