"""Labelme: one JSON file per image, with polygons, rectangles, circles and masks."""

import base64
import binascii
import io
import posixpath
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.datasets.pairs import read_names
from caaseg.data.importers.export import (
    Drawing,
    Export,
    ImageFiles,
    LabeledImage,
    json_files,
    read_annotations,
    sample_name,
    split_of,
)
from caaseg.data.importers.shapes import Region, polygon_mask

LISTS = ("labels.txt", "classes.txt")
IGNORED_NAMES = ("__ignore__",)
"""First line of Labelme's own lists; not a class."""
CIRCLE_POINTS = 90


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read the JSON files of Labelme in a directory, or one file. None if there are none."""
    contents = {file: read_annotations(file) for file in json_files(path)}
    contents = {file: found for file, found in contents.items() if isinstance(found, dict) and "shapes" in found}
    if not contents:
        return None
    root = path if path.is_dir() else path.parent
    regions = {file: _regions(file, content["shapes"]) for file, content in contents.items()}
    listed = next((root / name for name in LISTS if (root / name).is_file()), None)
    if listed:
        names = [name for name in read_names(listed, "correct it") if name not in IGNORED_NAMES]
    else:
        names = sorted({region.label for own in regions.values() for region in own})
    classes = drawing.classes(names)
    image_files = ImageFiles(images, root)
    found = []
    for file, content in contents.items():
        name = str(content.get("imagePath") or f"{file.stem}.jpg")
        beside = posixpath.normpath((file.parent.relative_to(root) / name.replace("\\", "/")).as_posix())
        image = image_files.find(beside, str(file))
        size = (content["imageHeight"], content["imageWidth"]) if content.get("imageHeight") else None
        split = split_of(*file.relative_to(root).parent.parts)
        label = drawing.label(regions[file], classes, default="order")
        found.append(LabeledImage(sample_name(split, name), image, label, size, bool(regions[file])))
    return Export("Labelme", classes, found, image_files.others(found))


def _regions(file: Path, shapes: list[dict[str, Any]]) -> list[Region]:
    sources = (f"{file}: shape {number}" for number, _ in enumerate(shapes, start=1))
    return [
        Region(str(shape.get("label")), source, partial(_mask, shape))
        for shape, source in zip(shapes, sources, strict=True)
    ]


def _mask(shape: dict[str, Any], height: int, width: int) -> NDArray[np.bool_]:
    kind, points = shape.get("shape_type", "polygon"), shape.get("points", [])
    if kind == "polygon":
        return polygon_mask(points, height, width)
    if kind not in ("rectangle", "circle", "mask") or len(points) != 2:
        raise ValueError(f"a {kind} of {len(points)} points; expected a polygon, rectangle, circle or mask")
    (x0, y0), (x1, y1) = points
    if kind == "rectangle":
        return polygon_mask([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], height, width)
    if kind == "circle":  # center, and a point on the circle
        angles = np.linspace(0, 2 * np.pi, CIRCLE_POINTS, endpoint=False)
        radius = float(np.hypot(x1 - x0, y1 - y0))
        return polygon_mask([(x0 + radius * np.cos(a), y0 + radius * np.sin(a)) for a in angles], height, width)
    try:
        part = np.array(Image.open(io.BytesIO(base64.b64decode(shape["mask"])), formats=("PNG",))) > 0  # (h, w)
    except (KeyError, binascii.Error, OSError, SyntaxError) as error:
        raise ValueError(f"a mask that is not a PNG ({error})") from error
    top, left = round(y0), round(x0)
    mask = np.zeros((height, width), dtype=np.bool_)
    if min(top, left) < 0 or top + part.shape[0] > height or left + part.shape[1] > width:
        raise ValueError(f"a mask of {part.shape[1]} x {part.shape[0]} at {left}, {top} that exceeds the image")
    mask[top : top + part.shape[0], left : left + part.shape[1]] = part
    return mask
