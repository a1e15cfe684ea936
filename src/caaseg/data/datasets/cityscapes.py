"""Cityscapes, fine labels: leftImg8bit/ and gtFine/, each with a folder a split and in it a folder a city.

The labelIds files, as shipped, are turned into the 19 classes of the benchmark while reading; the evaluation server
wants the way back.
"""

import re
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.datasets.pairs import Pair, PairDataset, check_split
from caaseg.data.labels import LabelTable, shipped_classes
from caaseg.data.sample import IGNORE, BadFileError
from caaseg.files import atomic_write

CLASSES = shipped_classes("cityscapes")
LABEL_IDS = range(34)  # those that are no class are not scored
SIZE = (1024, 2048)  # height, width

IMAGE_END = "_leftImg8bit.png"
LABEL_END = "_gtFine_labelIds.png"


class Cityscapes(PairDataset):
    """Cityscapes, 19 classes, 2048 x 1024. The test split's labels are not public: its samples carry IGNORE."""

    def __init__(self, root: Path, split: str) -> None:
        check_split("cityscapes", split, self.splits)
        images, labels = root / "leftImg8bit" / split, root / "gtFine" / split
        if not images.is_dir():
            raise BadFileError(
                f"{images}: no such folder; expected the images of Cityscapes, a folder a city; "
                "run caaseg data prepare cityscapes, or point --root at the dataset"
            )
        pairs = []
        for image in sorted(images.glob(f"*/*{IMAGE_END}")):
            name = image.name.removesuffix(IMAGE_END)
            label = labels / image.parent.name / f"{name}{LABEL_END}"
            pairs.append(Pair(name, image, None if split == "test" else label))
        ids = dict.fromkeys(LABEL_IDS, IGNORE) | {raw: k for k, raw in enumerate(CLASSES.raw)}
        super().__init__(
            pairs,
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=LabelTable(ids).read,
            owned=() if split == "test" else ((labels, f"*/*{LABEL_END}"),),
        )


def save_submission(prediction: NDArray[np.integer], name: str, folder: Path) -> Path:
    """Write one prediction as the evaluation server reads it: label ids, not training ids, in a PNG of 8 bits.

    Args:
        prediction: class ids from 0 to 18, (1024, 2048).
        name: the sample's name, city_sequence_frame.
        folder: where to; one PNG an image.
    """
    if not re.fullmatch(r"[a-z]+_\d{6}_\d{6}", name):
        raise ValueError(f"{name!r} is not a Cityscapes sample's name; expected city_sequence_frame")
    if prediction.shape != SIZE:
        raise ValueError(
            f"{name}: the prediction has shape {prediction.shape}; expected {SIZE}; resize the logits, not the labels"
        )
    if prediction.min() < 0 or prediction.max() >= len(CLASSES.raw):
        raise ValueError(
            f"{name}: the prediction has values from {prediction.min()} to {prediction.max()}; "
            f"expected class ids from 0 to {len(CLASSES.raw) - 1}"
        )
    encoded = BytesIO()
    Image.fromarray(np.asarray(CLASSES.raw, dtype=np.uint8)[prediction]).save(encoded, "PNG")
    path = folder / f"{name}_prediction.png"
    with atomic_write(path) as aside:
        aside.write_bytes(encoded.getvalue())
    return path
