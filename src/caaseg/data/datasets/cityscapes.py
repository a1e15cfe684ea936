"""Cityscapes with fine labels: leftImg8bit/ and gtFine/, each with one directory per split and city.

The published labelIds files are mapped to the 19 classes of the benchmark; submissions are mapped back to label ids.
"""

import re
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import Pair, PairDataset, check_split
from caaseg.data.labels import LabelTable, load_class_table
from caaseg.data.sample import IGNORE, BadFileError
from caaseg.errors import CaasegError
from caaseg.files import atomic_write

CLASSES = load_class_table("cityscapes")
LABEL_IDS = range(34)  # ids that are not a class are ignored
SIZE = (1024, 2048)  # height, width

IMAGE_SUFFIX = "_leftImg8bit.png"
LABEL_SUFFIX = "_gtFine_labelIds.png"


class Cityscapes(PairDataset):
    """Cityscapes, 19 classes, 2048 x 1024. Test labels are not public: all IGNORE."""

    def __init__(self, root: Path, split: str) -> None:
        check_split("cityscapes", split, self.splits)
        images, labels = root / "leftImg8bit" / split, root / "gtFine" / split
        if not images.is_dir():
            raise BadFileError(
                f"{images}: no such directory; expected the images of Cityscapes, one directory per city; "
                "run caaseg data prepare cityscapes, or point --root at the dataset"
            )
        pairs = []
        for image in sorted(images.glob(f"*/*{IMAGE_SUFFIX}")):
            name = image.name.removesuffix(IMAGE_SUFFIX)
            label = labels / image.parent.name / f"{name}{LABEL_SUFFIX}"
            pairs.append(Pair(name, image, None if split == "test" else label))
        ids = dict.fromkeys(LABEL_IDS, IGNORE) | {value: k for k, value in enumerate(CLASSES.values)}
        super().__init__(
            pairs,
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=LabelTable(ids).read,
            file_globs=() if split == "test" else ((labels, f"*/*{LABEL_SUFFIX}"),),
        )


PAGE = "www.cityscapes-dataset.com/downloads"
INFO = DatasetInfo(
    title="Cityscapes, fine labels",
    open=Cityscapes,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 2975, "val": 500, "test": 1525},
    image_size="2048 x 1024",
    how=f"download two archives by hand (login) from {PAGE}; prepare unpacks them",
    archives=(
        Archive(
            file="leftImg8bit_trainvaltest.zip",
            max_gigabytes=24,
            contents={"leftImg8bit": "leftImg8bit"},
            page=PAGE,
            sha1="2c0b77ce9933cc635adda307fbba5566f5d9d404",
        ),
        Archive(
            file="gtFine_trainvaltest.zip",
            max_gigabytes=1,
            contents={"gtFine": "gtFine"},
            page=PAGE,
            sha1="99f532cb1af174f5fcc4c5bc8feea8c66246ddbc",
        ),
    ),
)


def save_submission(prediction: NDArray[np.integer], name: str, directory: Path) -> Path:
    """Save a prediction for the evaluation server: an 8-bit PNG of label ids.

    Args:
        prediction: class ids from 0 to 18, (1024, 2048).
        name: name of the sample, city_sequence_frame.
        directory: output directory.
    """
    if not re.fullmatch(r"[a-z]+_\d{6}_\d{6}", name):
        raise CaasegError(f"{name!r} is not the name of a Cityscapes sample; expected city_sequence_frame")
    if prediction.shape != SIZE:
        raise CaasegError(
            f"{name}: the prediction has shape {prediction.shape}; expected {SIZE}; resize the logits, not the labels"
        )
    if prediction.min() < 0 or prediction.max() >= len(CLASSES.values):
        raise CaasegError(
            f"{name}: the prediction has values from {prediction.min()} to {prediction.max()}; "
            f"expected class ids from 0 to {len(CLASSES.values) - 1}"
        )
    encoded = BytesIO()
    Image.fromarray(np.asarray(CLASSES.values, dtype=np.uint8)[prediction]).save(encoded, "PNG")
    path = directory / f"{name}_prediction.png"
    with atomic_write(path) as temporary:
        temporary.write_bytes(encoded.getvalue())
    return path
