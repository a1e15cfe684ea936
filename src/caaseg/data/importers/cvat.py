"""CVAT for images 1.1: one XML file with polygons and masks.

CVAT's "Segmentation mask 1.1" is read by voc.py.
"""

from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from caaseg.data.importers.export import Drawing, Export, ImageFiles, LabeledImage, sample_name, split_of
from caaseg.data.importers.shapes import Region, polygon_mask
from caaseg.data.sample import BadFileError


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read the XML file of a CVAT export, or the only one in a directory. None if there is none."""
    files = [path] if path.is_file() else [*sorted(path.glob("*.xml")), *sorted(path.glob("annotations/*.xml"))]
    roots = [(file, _parse(file)) for file in files if file.suffix.lower() == ".xml" and file.is_file()]
    roots = [(file, root) for file, root in roots if root.tag == "annotations"]
    if not roots:
        return None
    if len(roots) > 1:
        raise BadFileError(f"{path}: {len(roots)} XML files of CVAT; expected one; import them one by one")
    file, root = roots[0]
    regions = {image: [_region(file, image, shape) for shape in _by_depth(image)] for image in root.iter("image")}
    listed = [label.findtext("name", "") for label in root.findall("meta//labels/label")]
    names = listed or sorted({region.label for found in regions.values() for region in found})
    classes = drawing.classes(list(dict.fromkeys(names)))
    found = []
    image_files = ImageFiles(images, file.parent)
    for image, own in regions.items():
        location = image_files.find(image.get("name", ""), str(file))
        size = int(image.get("height", 0)), int(image.get("width", 0))
        split = split_of(image.get("subset", ""))
        label = drawing.label(own, classes, default="order")
        name = sample_name(split, image.get("name", ""))
        found.append(LabeledImage(name, location, label, size if all(size) else None, bool(own)))
    return Export("CVAT XML", classes, found, image_files.others(found))


def _parse(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, OSError, ValueError) as error:
        raise BadFileError(f"{file}: cannot be read as XML ({error}); export the labels again") from error


def _by_depth(image: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the shapes of an image, the lowest first."""
    return sorted(image, key=lambda shape: int(shape.get("z_order", 0)))


def _region(file: Path, image: ElementTree.Element, shape: ElementTree.Element) -> Region:
    source = f"{file}: a {shape.tag} of {image.get('name')}"
    return Region(shape.get("label", ""), source, partial(_mask, shape))


def _mask(shape: ElementTree.Element, height: int, width: int) -> NDArray[np.bool_]:
    if shape.tag == "polygon":
        pairs = [point.split(",") for point in shape.get("points", "").split(";")]
        return polygon_mask([(float(x), float(y)) for x, y in pairs], height, width)
    if shape.tag != "mask":
        raise ValueError(f"a {shape.tag}; expected a polygon or a mask")
    left, top, columns, rows = (int(shape.get(name, -1)) for name in ("left", "top", "width", "height"))
    runs = np.array([int(run) for run in shape.get("rle", "").split(",")])
    if (runs < 0).any() or runs.sum() != columns * rows:
        expected = f"{columns} x {rows} = {columns * rows}"
        raise ValueError(f"run lengths that add up to {runs.sum()} pixels; expected {expected}")
    if min(left, top) < 0 or left + columns > width or top + rows > height:
        raise ValueError(f"a mask of {columns} x {rows} at {left}, {top} that exceeds the image")
    mask = np.zeros((height, width), dtype=np.bool_)
    # Runs of zeros and ones in turn, row by row.
    part = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(rows, columns)
    mask[top : top + rows, left : left + columns] = part
    return mask
