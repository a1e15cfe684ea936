"""Label Studio JSON: brush masks and polygons."""

import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES
from caaseg.data.decode import MAX_PIXELS
from caaseg.data.importers.export import (
    Drawing,
    Export,
    ImageFiles,
    LabeledImage,
    json_files,
    read_annotations,
    sample_name,
)
from caaseg.data.importers.shapes import Region, polygon_mask
from caaseg.data.sample import BadFileError

UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{8}-")
"""Label Studio puts this before the name of an uploaded file."""


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read a JSON export: a file, or the only one in a directory. None for other formats."""
    contents = [(file, read_annotations(file)) for file in json_files(path)]
    contents = [(file, tasks) for file, tasks in contents if _is_export(tasks)]
    if not contents:
        return None
    if len(contents) > 1:
        raise BadFileError(f"{path}: {len(contents)} exports of Label Studio; expected one; import them one by one")
    file, tasks = contents[0]
    regions = [_regions(file, task) for task in tasks]
    classes = drawing.classes(sorted({region.label for found in regions for region in found}))
    image_files = ImageFiles(images, file.parent)
    found = []
    for task, own in zip(tasks, regions, strict=True):
        name = _image_name(file, task)
        source = f"{file}: task {task.get('id')}"
        image = image_files.find(name, source)
        if isinstance(image, BadFileError) and UPLOAD_PREFIX.match(name):
            name = UPLOAD_PREFIX.sub("", name)
            image = image_files.find(name, source)
        label = drawing.label(own, classes, default="order")
        found.append(LabeledImage(sample_name("", name), image, label, annotated=bool(own)))
    return Export("Label Studio JSON", classes, found)


def _is_export(tasks: Any) -> bool:
    return (
        isinstance(tasks, list)
        and len(tasks) > 0
        and all(isinstance(task, dict) and isinstance(task.get("data"), dict) for task in tasks)
        and all(isinstance(task.get("annotations"), list) for task in tasks)
    )


def _image_name(file: Path, task: dict[str, Any]) -> str:
    """Return the file name in the address of a task's image."""
    for value in task["data"].values():
        address = urlparse(str(value))
        name = unquote(parse_qs(address.query).get("d", [address.path])[0]).replace("\\", "/").rsplit("/", 1)[-1]
        if Path(name).suffix.lower() in IMAGE_SUFFIXES:
            return name
    raise BadFileError(f"{file}: task {task.get('id')} names no image; expected one in data; export the labels again")


def _regions(file: Path, task: dict[str, Any]) -> list[Region]:
    """Return the regions of the last annotation of a task that was not cancelled."""
    annotations = [one for one in task["annotations"] if not one.get("was_cancelled")]
    results = annotations[-1].get("result", []) if annotations else []
    regions = []
    for number, result in enumerate(results, start=1):
        value, kind = result.get("value", {}), result.get("type", "")
        source = f"{file}: task {task.get('id')}, region {number}"
        names = value.get(kind) or []
        if kind in ("choices", "textarea", "rating"):  # about the image, not about pixels
            continue
        if not names:
            raise BadFileError(f"{source}: a region without a class; expected one; give it a label in Label Studio")
        regions.append(Region(str(names[0]), source, partial(_mask, result)))
    return regions


def _mask(result: dict[str, Any], height: int, width: int) -> NDArray[np.bool_]:
    value = result["value"]
    stated = result.get("original_height", height), result.get("original_width", width)
    if stated != (height, width):
        raise ValueError(f"a region of an image of {stated[1]} x {stated[0]}; expected {width} x {height}")
    if "points" in value:  # in percent of the image
        return polygon_mask([(x * width / 100, y * height / 100) for x, y in value["points"]], height, width)
    if "rle" not in value:
        raise ValueError(f"a region of type {result.get('type')}; expected a brush mask or a polygon")
    pixels = decode_brush(value["rle"])
    if pixels.size != height * width * 4:
        raise ValueError(
            f"run lengths that add up to {pixels.size // 4} pixels; expected {height} x {width} = {height * width}"
        )
    return pixels.reshape(height, width, 4)[:, :, 3] > 0  # RGBA


def decode_brush(encoded: list[int]) -> NDArray[np.uint8]:
    """Decode the run lengths of a brush mask: a stream of bits. Raises ValueError if it is damaged.

    It starts with the number of values (32 bits), the bits per value minus one (5 bits), and four choices of the bits
    per run length, each minus one (4 bits). Then follow the runs: a bit (1: one value for the whole run, 0: one
    value per position), which of the four choices applies (2 bits), the length minus one, and the value or values.
    """
    try:
        bits = np.unpackbits(np.array(encoded, dtype=np.uint8)).tolist()
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"run lengths that are not bytes ({error})") from error
    position = 0

    def take(count: int) -> int:
        nonlocal position
        if position + count > len(bits):
            raise ValueError("run lengths that are truncated")
        value = 0
        for bit in bits[position : position + count]:
            value = value << 1 | bit
        position += count
        return value

    total, bits_per_value = take(32), take(5) + 1
    length_bits = [take(4) + 1 for _ in range(4)]
    if bits_per_value != 8 or total > 4 * MAX_PIXELS:
        raise ValueError(f"{total} values of {bits_per_value} bits; expected an 8-bit RGBA image")
    values = np.zeros(total, dtype=np.uint8)
    filled = 0
    while filled < total:
        is_run = take(1)
        end = filled + take(length_bits[take(2)]) + 1
        if end > total:
            raise ValueError("run lengths that exceed the image")
        values[filled:end] = take(8) if is_run else [take(8) for _ in range(end - filled)]
        filled = end
    return values
