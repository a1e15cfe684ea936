"""PASCAL VOC 2012, 21 classes with background, and its larger training split train_aug with labels of SBD.

The PNG files have palettes; their indices are the class ids. SegmentationObject/ holds instances and is never read.
SBD, the Semantic Boundaries Dataset, has MATLAB files with labels of more VOC images. Labels of images in neither train
nor val are converted to PNG files in VOCdevkit/VOC2012/SegmentationClassAug. trainaug.txt lists these images and train.
Other projects use the same names, so that their converted files can be read.
"""

from pathlib import Path
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import Pair, PairDataset, check_split, file_names, read_names
from caaseg.data.labels import LabelTable, abbreviate, load_class_table
from caaseg.data.prepare.convert import ConversionJob
from caaseg.data.prepare.mat import read_mat
from caaseg.data.sample import IGNORE, BadFileError

CLASSES = load_class_table("voc2012")
LABEL_TABLE = LabelTable(
    {255: IGNORE} | {value: k for k, value in enumerate(CLASSES.values)},
    advice=(
        "the label was probably shifted by one, converted to colors, or is one of SegmentationObject/, which holds "
        "instances; use the files of SegmentationClass/ as published"
    ),
)

VOC = Path("VOCdevkit/VOC2012")
IMAGES = VOC / "JPEGImages"
LABELS = VOC / "SegmentationClass"
LISTS = VOC / "ImageSets" / "Segmentation"
AUG_LABELS = VOC / "SegmentationClassAug"
AUG_LIST = LISTS / "trainaug.txt"
SBD = Path("benchmark_RELEASE/dataset")
SBD_LABELS = SBD / "cls"
SBD_LISTS = (SBD / "train.txt", SBD / "val.txt")  # their split differs from that of VOC
SBD_ARCHIVE = "benchmark.tgz"


class VOC2012(PairDataset):
    """PASCAL VOC 2012 segmentation. Split train_aug needs the converted labels of SBD."""

    splits = ("train", "val", "trainval", "train_aug")

    def __init__(self, root: Path, split: str) -> None:
        check_split("voc2012", split, self.splits)
        names = _names(root, split)
        labels, problems = dict.fromkeys(names, LABELS), list[str]()
        if split == "train_aug":
            labels |= dict.fromkeys(set(names).difference(_names(root, "train")), AUG_LABELS)
            if leaked := sorted(set(names).intersection(_names(root, "val"))):
                problems.append(
                    f"{root / AUG_LIST}: images of split val: {abbreviate(leaked)}; expected none, because models are "
                    "evaluated on them; remove these lines"
                )
        super().__init__(
            (Pair(name, root / IMAGES / f"{name}.jpg", root / labels[name] / f"{name}.png") for name in names),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=LABEL_TABLE.read,
            file_globs=((root / LABELS, "*.png"),),
            problems=problems,
        )


def _names(root: Path, split: str) -> list[str]:
    command = f"caaseg data prepare voc2012 --root {quote(str(root))}"
    if split == "train_aug":
        return read_names(root / AUG_LIST, f"run {command} --optional to add the labels of SBD, or use split train")
    return read_names(root / LISTS / f"{split}.txt", f"run {command}, or point --root at the parent of VOCdevkit")


def available_splits(root: Path) -> tuple[str, ...]:
    """Return the splits of a root: train_aug only if any file of SBD exists."""
    has_sbd = any((root / path).exists() for path in (AUG_LABELS, SBD_LABELS, SBD_ARCHIVE))
    return VOC2012.splits if has_sbd else ("train", "val", "trainval")


def conversion(root: Path) -> ConversionJob | None:
    """Return the conversion of the labels of SBD; None if there are none, or if they are converted already."""
    if (root / AUG_LABELS).is_dir():
        if not (root / AUG_LIST).is_file():
            raise BadFileError(
                f"{root / AUG_LIST}: no such file, but {root / AUG_LABELS} exists; expected both or none; "
                "move that directory elsewhere, and run the same command again"
            )
        return None
    if not (root / SBD_LABELS).is_dir():
        return None
    train, val = _names(root, "train"), _names(root, "val")
    labeled = {name for path in SBD_LISTS for name in read_names(root / path, f"unpack {SBD_ARCHIVE} again")}
    added = sorted(labeled.difference(train, val))
    absent = set(added) - {name.removesuffix(".mat") for name in file_names(root / SBD_LABELS)}
    if absent:
        raise BadFileError(
            f"{root / SBD_LABELS}: no label map for {len(absent)} of {len(added)} images, such as {min(absent)}.mat; "
            f"expected one per image; unpack {SBD_ARCHIVE} again"
        )
    return ConversionJob(
        target=root / AUG_LABELS,
        sources={name: root / SBD_LABELS / f"{name}.mat" for name in added},
        read=labels_from_mat,
        lists={root / AUG_LIST: "".join(f"{name}\n" for name in (*train, *added))},
    )


def labels_from_mat(path: Path) -> NDArray[np.uint8]:
    """Read the class ids of a MATLAB file of SBD, (H, W)."""
    return LABEL_TABLE.apply(read_mat(path, "GTcls.Segmentation"), path)


INFO = DatasetInfo(
    title="PASCAL VOC 2012, background scored",
    open=VOC2012,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 1464, "val": 1449, "trainval": 2913, "train_aug": 10582},
    splits=available_splits,
    image_size="about 500 x 375",
    how="prepare downloads it (2 GB); with --optional also SBD (1.4 GB), which train_aug needs",
    archives=(
        Archive(
            file="VOCtrainval_11-May-2012.tar",
            max_gigabytes=3,
            contents={path.as_posix(): path.as_posix() for path in (IMAGES, LABELS, LISTS)},
            address="http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
            sha1="4e443f8a2eca6b1dac8a6c57641b67dd40621a49",
        ),
        Archive(
            file=SBD_ARCHIVE,
            max_gigabytes=2,
            contents={path.as_posix(): path.as_posix() for path in (SBD_LABELS, *SBD_LISTS)},
            address=(
                "http://www.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz"
            ),
            sha1="7129e0a480c2d6afb02b517bb18ac54283bfaa35",
            optional=True,
            replaced_by=(str(AUG_LABELS),),
        ),
    ),
    conversion=conversion,
)
