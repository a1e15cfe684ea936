"""COCO JSON: polygons, and run-length encoded masks in both forms."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from caaseg.data.importers.shapes import Region, polygons_mask
from caaseg.data.rle import decode_rle
from caaseg.data.sample import BadFileError

KEYS = {"images", "annotations", "categories"}


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read a COCO export: a JSON file, or a directory with one per split. None for other formats."""
    contents = {file: read_annotations(file) for file in json_files(path)}
    contents = {file: found for file, found in contents.items() if isinstance(found, dict) and found.keys() >= KEYS}
    # The official annotations have keypoint files beside the instances, of the same images.
    contents = {file: content for file, content in contents.items() if file.name.startswith("instances")} or contents
    if not contents:
        return None
    tables = [_categories(content, file) for file, content in contents.items()]
    if any(table != tables[0] for table in tables):
        raise BadFileError(f"{path}: the JSON files have different categories; make them equal, or import each alone")
    categories = tables[0]
    classes = drawing.classes(list(dict.fromkeys(categories.values())))
    found: list[LabeledImage] = []
    for file, content in contents.items():
        split = split_of(file.stem, file.parent.name) if len(contents) > 1 else ""
        above = file.parent.parent if file.parent.name == "annotations" else None
        files = ImageFiles(images, file.parent, path if path.is_dir() else None, above)
        found += _read_file(file, content, categories, split, files, drawing, classes)
    all_files = ImageFiles(images, path if path.is_dir() else None)
    return Export("COCO JSON", classes, found, all_files.others(found))


def _read_file(
    file: Path,
    content: dict[str, Any],
    categories: dict[int, str],
    split: str,
    files: ImageFiles,
    drawing: Drawing,
    classes: tuple[str, ...],
) -> list[LabeledImage]:
    regions: dict[int, list[Region]] = {}
    names = {image["id"]: image["file_name"] for image in content["images"]}
    for annotation in content["annotations"]:
        image_id, category = annotation.get("image_id"), annotation.get("category_id")
        source = f"{file}: annotation {annotation.get('id')} of {names.get(image_id, f'image {image_id}')}"
        if image_id not in names:
            raise BadFileError(f"{source}: the list of images has no id {image_id}; export the labels again")
        mask = partial(_mask, annotation.get("segmentation"))
        regions.setdefault(image_id, []).append(Region(categories.get(category, f"category {category}"), source, mask))
    found = []
    for image in content["images"]:
        path = files.find(image["file_name"], str(file))
        own = regions.get(image["id"], [])
        label = drawing.label(own, classes, default="area")
        size = (image["height"], image["width"]) if image.get("height") and image.get("width") else None
        found.append(LabeledImage(sample_name(split, image["file_name"]), path, label, size, bool(own)))
    return found


def _categories(content: dict[str, Any], file: Path) -> dict[int, str]:
    try:
        categories = {category["id"]: str(category["name"]) for category in content["categories"]}
        return {key: categories[key] for key in sorted(categories)}
    except (KeyError, TypeError) as error:
        raise BadFileError(f"{file}: categories without id or name; expected both; export the labels again") from error


def _mask(segmentation: Any, height: int, width: int) -> NDArray[np.bool_]:
    if isinstance(segmentation, dict) and "counts" in segmentation:
        if segmentation.get("size", [height, width]) != [height, width]:
            raise ValueError(f"a mask of size {segmentation['size']}; expected {[height, width]}")
        return decode_rle(segmentation["counts"], height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("no segmentation, only a bounding box; expected polygons or a mask")
    if any(not isinstance(ring, list) or len(ring) % 2 for ring in segmentation):
        raise ValueError("a polygon with an odd number of coordinates; expected x and y in turn")
    return polygons_mask([list(zip(ring[::2], ring[1::2], strict=True)) for ring in segmentation], height, width)
