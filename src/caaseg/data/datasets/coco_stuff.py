"""COCO-Stuff, 171 classes: the 10K set of 2016 (v1.1, MATLAB files) and the 164K set of 2017 (PNG files).

The PNG files of 164K store the official ids minus one; the MATLAB files of 10K store them as they are.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import Pair, PairDataset, by_stem, check_split, names_in, read_names
from caaseg.data.labels import LabelTable, shipped_classes
from caaseg.data.prepare.convert import Conversion
from caaseg.data.prepare.mat import read_mat
from caaseg.data.sample import IGNORE, BadFileError

CLASSES = shipped_classes("coco_stuff")
IDS = {raw: k for k, raw in enumerate(CLASSES.raw)}
"""Official id to class id. Eleven ids from 1 to 182 were left empty: meeting one is an error."""

FROM_MAT = LabelTable({0: IGNORE} | IDS)
FROM_PNG = LabelTable({255: IGNORE} | {raw - 1: k for raw, k in IDS.items()})
CONVERTED = LabelTable({255: IGNORE} | {k: k for k in range(len(CLASSES.raw))})


class CocoStuff10K(PairDataset):
    """COCO-Stuff 10K v1.1: images/ and, converted from annotations/, labels/; lists in imageLists/."""

    splits = ("train", "test")

    def __init__(self, root: Path, split: str) -> None:
        check_split("coco_stuff_10k", split, self.splits)
        names = read_names(root / "imageLists" / f"{split}.txt", "run caaseg data prepare coco_stuff_10k")
        super().__init__(
            (Pair(name, root / "images" / f"{name}.jpg", root / "labels" / f"{name}.png") for name in names),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=CONVERTED.read,
            owned=((root / "images", "*.jpg"), (root / "labels", "*.png")),
        )


def conversion_10k(root: Path) -> Conversion | None:
    """What is to be made of the MATLAB files; None if it is there."""
    if (root / "labels").is_dir():
        return None
    names = [name.removesuffix(".mat") for name in sorted(names_in(root / "annotations")) if name.endswith(".mat")]
    if not names:
        raise BadFileError(f"{root / 'annotations'}: no .mat files; expected the labels of COCO-Stuff 10K v1.1")
    return Conversion(
        target=root / "labels",
        sources={name: root / "annotations" / f"{name}.mat" for name in names},
        read=labels_from_mat,
    )


def labels_from_mat(path: Path) -> NDArray[np.uint8]:
    """Class ids out of one MATLAB file."""
    return FROM_MAT.apply(read_mat(path, "S"), path)


class CocoStuff164K(PairDataset):
    """COCO-Stuff 164K: images/train2017 and annotations/train2017, and so for val."""

    splits = ("train", "val")

    def __init__(self, root: Path, split: str) -> None:
        check_split("coco_stuff_164k", split, self.splits)
        images, labels = root / "images" / f"{split}2017", root / "annotations" / f"{split}2017"
        if not images.is_dir():
            raise BadFileError(
                f"{images}: no such folder; expected the images of COCO 2017; "
                "run caaseg data prepare coco_stuff_164k, or point --root at the dataset"
            )
        super().__init__(
            (Pair(name, image, labels / f"{name}.png") for name, image in by_stem(images, (".jpg",)).items()),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=FROM_PNG.read,
            owned=((labels, "[0-9]*[0-9].png"),),  # converters of other projects leave theirs beside
        )
