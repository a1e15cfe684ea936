"""COCO-Stuff, 171 classes: 10K (2016, v1.1, MATLAB label files) and 164K (2017, PNG label files).

The PNG files of 164K store the official ids minus one; the MATLAB files of 10K store the official ids.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import Pair, PairDataset, check_split, file_names, files_by_stem, read_names
from caaseg.data.labels import LabelTable, load_class_table
from caaseg.data.prepare.convert import ConversionJob
from caaseg.data.prepare.mat import read_mat
from caaseg.data.sample import IGNORE, BadFileError

CLASSES = load_class_table("coco_stuff")
IDS = {value: k for k, value in enumerate(CLASSES.values)}
"""Official id to class id. Eleven ids from 1 to 182 are unused; a label with one of them is an error."""

FROM_MAT = LabelTable({0: IGNORE} | IDS)
FROM_PNG = LabelTable({255: IGNORE} | {value - 1: k for value, k in IDS.items()})
CONVERTED = LabelTable({255: IGNORE} | {k: k for k in range(len(CLASSES.values))})


class CocoStuff10K(PairDataset):
    """COCO-Stuff 10K v1.1: images/, labels/ (converted from annotations/) and lists in imageLists/."""

    splits = ("train", "test")

    def __init__(self, root: Path, split: str) -> None:
        check_split("coco_stuff_10k", split, self.splits)
        names = read_names(root / "imageLists" / f"{split}.txt", "run caaseg data prepare coco_stuff_10k")
        super().__init__(
            (Pair(name, root / "images" / f"{name}.jpg", root / "labels" / f"{name}.png") for name in names),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=CONVERTED.read,
            file_globs=((root / "images", "*.jpg"), (root / "labels", "*.png")),
        )


def conversion_10k(root: Path) -> ConversionJob | None:
    """Return the conversion of the MATLAB files; None if they are converted already."""
    if (root / "labels").is_dir():
        return None
    names = [name.removesuffix(".mat") for name in sorted(file_names(root / "annotations")) if name.endswith(".mat")]
    if not names:
        raise BadFileError(f"{root / 'annotations'}: no .mat files; expected the labels of COCO-Stuff 10K v1.1")
    return ConversionJob(
        target=root / "labels",
        sources={name: root / "annotations" / f"{name}.mat" for name in names},
        read=labels_from_mat,
    )


def labels_from_mat(path: Path) -> NDArray[np.uint8]:
    """Read the class ids of a MATLAB file, (H, W)."""
    return FROM_MAT.apply(read_mat(path, "S"), path)


class CocoStuff164K(PairDataset):
    """COCO-Stuff 164K: images/train2017 and annotations/train2017, and likewise for val."""

    splits = ("train", "val")

    def __init__(self, root: Path, split: str) -> None:
        check_split("coco_stuff_164k", split, self.splits)
        images, labels = root / "images" / f"{split}2017", root / "annotations" / f"{split}2017"
        if not images.is_dir():
            raise BadFileError(
                f"{images}: no such directory; expected the images of COCO 2017; "
                "run caaseg data prepare coco_stuff_164k, or point --root at the dataset"
            )
        super().__init__(
            (Pair(name, image, labels / f"{name}.png") for name, image in files_by_stem(images, (".jpg",)).items()),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=FROM_PNG.read,
            file_globs=((labels, "[0-9]*[0-9].png"),),  # other projects save converted labels next to them
        )


INFO_10K = DatasetInfo(
    title="COCO-Stuff 10K v1.1",
    open=CocoStuff10K,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 9000, "test": 1000},
    image_size="about 640 x 480",
    how="prepare downloads (2 GB) and converts it",
    archives=(
        Archive(
            file="cocostuff-10k-v1.1.zip",
            max_gigabytes=4,
            contents={name: name for name in ("images", "annotations", "imageLists")},
            address="http://calvin.inf.ed.ac.uk/wp-content/uploads/data/cocostuffdataset/cocostuff-10k-v1.1.zip",
        ),
    ),
    conversion=conversion_10k,
)
INFO_164K = DatasetInfo(
    title="COCO-Stuff 164K",
    open=CocoStuff164K,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 118287, "val": 5000},
    image_size="about 640 x 480",
    how="prepare downloads it (20 GB)",
    archives=(
        Archive(
            file="train2017.zip",
            max_gigabytes=40,
            contents={"train2017": "images/train2017"},
            address="http://images.cocodataset.org/zips/train2017.zip",
        ),
        Archive(
            file="val2017.zip",
            max_gigabytes=2,
            contents={"val2017": "images/val2017"},
            address="http://images.cocodataset.org/zips/val2017.zip",
        ),
        Archive(
            file="stuffthingmaps_trainval2017.zip",
            max_gigabytes=2,
            contents={"train2017": "annotations/train2017", "val2017": "annotations/val2017"},
            address=(
                "http://calvin.inf.ed.ac.uk/wp-content/uploads/data/cocostuffdataset/stuffthingmaps_trainval2017.zip"
            ),
        ),
    ),
)
