"""Images for the calibration of INT8 models: a directory of images, or the training images of a labeled dataset."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from caaseg.data.catalogue import open_dataset
from caaseg.data.datasets.folder import find_parts
from caaseg.data.datasets.pairs import IMAGE_SUFFIXES
from caaseg.data.decode import read_image
from caaseg.data.inputs import find_images
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError

MIN_IMAGES = 8
"""Fewer images may not show the ranges of the activations."""
MAX_IMAGES = 32
"""Number of images for calibration; more gave the same scores on CamVid."""
MAX_COMPARED = 100
"""Number of images without labels on which two models are compared."""

Read = Callable[[], Tensor]
"""Reads an image, (3, H, W) uint8."""


class Calibration(NamedTuple):
    """Images for calibration, and other images on which the INT8 model is compared with the float32 model."""

    images: list[Read]
    others: list[Read]  # the images for calibration if there are no others


def find_dataset(directory: Path) -> str | None:
    """Return the name of the labeled dataset that a directory holds: camvid or folder; None for plain images."""
    root = directory / "CamVid" if (directory / "CamVid").is_dir() else directory
    if (root / "train.txt").is_file() and (root / "trainannot").is_dir():
        return "camvid"
    try:
        find_parts(directory)
    except CaasegError:
        return None
    return "folder"


def open_calibration(directory: Path, dataset: str | None) -> Calibration:
    """Choose images for calibration, evenly spaced.

    Args:
        directory: directory of images, which may be in subdirectories, or root of a dataset.
        dataset: name of the dataset, whose training images are used; None for a directory of images.
    """
    if not directory.is_dir():
        raise CaasegError(f"{directory}: no such directory; expected images for calibration; check --calibrate")
    if dataset is None:
        found = find_images([str(directory)])
        paths = [image.path for image in found.images if image.path.suffix.lower() in IMAGE_SUFFIXES]
        images = [_file_reader(path) for path in paths]
    else:
        images = _sample_readers(open_dataset(dataset, directory, "train"))
    if len(images) < MIN_IMAGES:
        raise CaasegError(
            f"{directory}: {len(images)} images for calibration; expected at least {MIN_IMAGES}, in which all kinds "
            "of content occur; add images, or give another directory with --calibrate"
        )
    chosen = evenly_spaced(range(len(images)), MAX_IMAGES)
    others = [k for k in range(len(images)) if k not in set(chosen)] or chosen
    return Calibration([images[k] for k in chosen], [images[k] for k in evenly_spaced(others, MAX_COMPARED)])


def evenly_spaced(items: Sequence[int], number: int) -> list[int]:
    """Return at most a number of items, evenly spaced from the first."""
    count = min(number, len(items))
    return [items[k * len(items) // count] for k in range(count)]


def _file_reader(path: Path) -> Read:
    return lambda: read_image(path)


def _sample_readers(dataset: SegmentationDataset) -> list[Read]:
    def reader(index: int) -> Read:
        return lambda: dataset[index].image

    return [reader(index) for index in range(len(dataset))]
