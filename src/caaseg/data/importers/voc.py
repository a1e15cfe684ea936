"""PASCAL VOC: SegmentationClass/ with color masks. Also CVAT's "Segmentation mask 1.1", which has a labelmap.txt."""

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import MASK_SUFFIXES, files_by_stem, read_names
from caaseg.data.importers.export import Drawing, Export, ImageFiles, LabeledImage, sample_name, split_of
from caaseg.data.labels import ColorTable
from caaseg.data.sample import IGNORE, BadFileError, Color

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
VOID: Color = (224, 224, 192)


def read(path: Path, images: Path | None, drawing: Drawing) -> Export | None:
    """Read a directory with SegmentationClass/. None if it has none."""
    directory = path / "SegmentationClass"
    if not directory.is_dir():
        return None
    colors = _labelmap(path / "labelmap.txt") if (path / "labelmap.txt").is_file() else _voc_colors()
    table = ColorTable({color: k for k, color in enumerate(colors.values())} | {VOID: IGNORE})
    masks = files_by_stem(directory, MASK_SUFFIXES)
    splits: dict[str, str] = {}
    lists = sorted((path / "ImageSets" / "Segmentation").glob("*.txt"))
    for file in lists if len(lists) > 1 else []:
        if split := split_of(file.stem):
            splits |= dict.fromkeys(read_names(file, "export the labels again"), split)
    image_files = ImageFiles(images, path / "JPEGImages", path)
    found = []
    for stem, mask in masks.items():
        image = _image(stem, mask, image_files)
        name = sample_name(splits.get(stem, ""), mask.name)
        found.append(LabeledImage(name, image, partial(_read, table, mask)))
    return Export("VOC masks", tuple(colors), found)


def _image(stem: str, mask: Path, image_files: ImageFiles) -> Path | BadFileError:
    for suffix in (".jpg", ".jpeg", ".png"):
        found = image_files.find(f"{stem}{suffix}", str(mask))
        if isinstance(found, Path) and "Segmentation" not in found.parent.name:
            return found
    return BadFileError(f"{mask}: no such image file: {stem}.jpg or .png; export it too, or give it with --images")


def _read(table: ColorTable, mask: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    return table.read(mask)


def _labelmap(file: Path) -> dict[str, Color]:
    """Return the color of each class from lines such as "road:128,64,128::"."""
    colors: dict[str, Color] = {}
    for line in read_names(file, "export the labels again"):
        name, _, rest = line.partition(":")
        if line.startswith("#"):
            continue
        try:
            red, green, blue = (int(part) for part in rest.split(":")[0].split(","))
        except ValueError as error:
            raise BadFileError(f"{file}: the line {line!r}; expected name:red,green,blue; export again") from error
        colors[name] = (red, green, blue)
    background = [name for name in colors if name.lower() == "background"]
    return {name: colors[name] for name in (*background, *(name for name in colors if name not in background))}


def _voc_colors() -> dict[str, Color]:
    """Return PASCAL VOC's color map: the bits of a class id, three at a time, from the highest bit of each channel."""
    colors: dict[str, Color] = {}
    for k, name in enumerate(VOC_CLASSES):
        channels = [sum((k >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8)) for channel in range(3)]
        colors[name] = (channels[0], channels[1], channels[2])
    return colors
