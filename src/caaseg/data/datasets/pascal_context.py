"""PASCAL Context: VOC2010 photos with dense labels, evaluated on 59 classes, or 60 with background.

Labels are published as MATLAB files (trainval/) and as run lengths in trainval_merged.json. Both are converted to PNG
files in VOCdevkit/VOC2010/SegmentationClassContext, with 0 for background and 1 to 59 for the classes, for both
protocols. The two sources differ in some pixels; source.txt next to the lists of names says which source was used.
"""

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import Pair, PairDataset, check_split, file_names, read_names
from caaseg.data.labels import LabelTable, distinct_colors, load_class_table
from caaseg.data.prepare.convert import ConversionJob
from caaseg.data.prepare.mat import read_mat
from caaseg.data.rle import decode_rle
from caaseg.data.sample import IGNORE, BadFileError

CLASSES = load_class_table("pascal_context")
CLASSES_60 = ("background", *CLASSES.names)
PALETTE_60 = (distinct_colors(60)[-1], *CLASSES.palette)
ALL_CLASSES = 459  # 59 are evaluated, the others are background

VOC = Path("VOCdevkit/VOC2010")
IMAGES = VOC / "JPEGImages"
LABELS = VOC / "SegmentationClassContext"
LISTS = VOC / "ImageSets" / "SegmentationContext"
MAT_LABELS = Path("trainval")
MAT_LISTS = VOC / "ImageSets" / "Main"
JSON_LABELS = VOC / "trainval_merged.json"

TO_CONVERTED = LabelTable(
    dict.fromkeys(range(ALL_CLASSES + 1), 0) | {value: k + 1 for k, value in enumerate(CLASSES.values)}
)


class PascalContext(PairDataset):
    """PASCAL Context, converted. With 59 classes background is ignored; with 60 it is class 0."""

    splits = ("train", "val")

    def __init__(self, root: Path, split: str, *, protocol: Literal[59, 60] = 59) -> None:
        check_split("pascal_context", split, self.splits)
        names = read_names(root / LISTS / f"{split}.txt", "run caaseg data prepare pascal_context")
        if protocol == 59:
            ids = {0: IGNORE} | {k + 1: k for k in range(59)}
            classes, palette = CLASSES.names, CLASSES.palette
        else:
            ids = {k: k for k in range(60)}
            classes, palette = CLASSES_60, PALETTE_60
        super().__init__(
            (Pair(name, root / IMAGES / f"{name}.jpg", root / LABELS / f"{name}.png") for name in names),
            classes=classes,
            palette=palette,
            read_label=LabelTable(ids).read,
            file_globs=((root / LABELS, "*.png"),),
        )


def conversion(root: Path) -> ConversionJob | None:
    """Return the conversion of the MATLAB files or, without them, of the JSON file; None if it is done already."""
    if (root / LABELS).is_dir():
        return None
    if (root / MAT_LABELS).is_dir():
        return _from_mat(root)
    return _from_json(root, root / JSON_LABELS)


def _from_mat(root: Path) -> ConversionJob:
    names = {split: read_names(root / MAT_LISTS / f"{split}.txt", "unpack VOC2010") for split in PascalContext.splits}
    sources = {name: root / MAT_LABELS / f"{name}.mat" for split in names.values() for name in split}
    absent = sources.keys() - {name.removesuffix(".mat") for name in file_names(root / MAT_LABELS)}
    if absent:
        raise BadFileError(
            f"{root / MAT_LABELS}: no label map for {len(absent)} of {len(sources)} images, such as {min(absent)}.mat; "
            "expected one per image; unpack the archive again"
        )
    return ConversionJob(
        target=root / LABELS, sources=sources, read=labels_from_mat, lists=_lists(root, names, "trainval/*.mat")
    )


def labels_from_mat(path: Path) -> NDArray[np.uint8]:
    """Return a label map, (H, W), with 0 for background and 1 to 59 for the classes."""
    return TO_CONVERTED.apply(read_mat(path, "LabelMap"), path)


class Regions(NamedTuple):
    """Regions of one image in the JSON file."""

    source: Path  # for messages: the JSON file / the name of the image
    height: int
    width: int
    regions: list[tuple[int, str | list[int]]]  # stored id and run lengths; later regions cover earlier regions


def _from_json(root: Path, path: Path) -> ConversionJob:
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
        regions: dict[int, list[tuple[int, str | list[int]]]] = defaultdict(list)
        for entry in content["annos_segmentation"]:
            regions[entry["image_id"]].append((int(entry["category_id"]), entry["segmentation"]["counts"]))
        sources, names = {}, {split: list[str]() for split in PascalContext.splits}
        for image in content["images"]:
            if image["phase"] in names:
                name = Path(image["file_name"]).stem
                size = int(image["height"]), int(image["width"])
                sources[name] = Regions(path / name, *size, regions[image["image_id"]])
                names[image["phase"]].append(name)
    except FileNotFoundError:
        raise BadFileError(
            f"{path}: no such file, and no directory {root / MAT_LABELS} either; expected the labels in one of them; "
            "run caaseg data prepare pascal_context"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFileError(
            f"{path}: not the labels of PASCAL in Detail ({type(error).__name__}: {error}); "
            "expected images and annos_segmentation; download the file again"
        ) from error
    return ConversionJob(
        target=root / LABELS, sources=sources, read=labels_from_regions, lists=_lists(root, names, path.name)
    )


def labels_from_regions(image: Regions) -> NDArray[np.uint8]:
    """Return a label map, (H, W), with 0 for background and 1 to 59 for the classes."""
    values = np.zeros((image.height, image.width), dtype=np.int64)
    for category, counts in image.regions:
        try:
            values[decode_rle(counts, image.height, image.width)] = category
        except (ValueError, TypeError, OverflowError) as error:
            raise BadFileError(f"{image.source}: a damaged region ({error}); download the file again") from error
    return TO_CONVERTED.apply(values, image.source)


def _lists(root: Path, names: dict[str, list[str]], source: str) -> dict[Path, str]:
    texts = {root / LISTS / f"{split}.txt": "\n".join(listed) + "\n" for split, listed in names.items()}
    return {**texts, root / LISTS / "source.txt": f"{source}\n"}


MAT_ARCHIVE = Archive(
    file="trainval.tar.gz",
    max_gigabytes=1,
    contents={"trainval": str(MAT_LABELS)},
    page="cs.stanford.edu/~roozbeh/pascal-context",
    optional=True,
)
INFO = DatasetInfo(
    title="PASCAL Context, background ignored",
    open=PascalContext,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 4998, "val": 5105},
    image_size="about 500 x 375",
    how="prepare downloads and converts it; from the MATLAB labels if trainval.tar.gz is at the root",
    archives=(
        Archive(
            file="VOCtrainval_03-May-2010.tar",
            max_gigabytes=3,
            contents={path.as_posix(): path.as_posix() for path in (IMAGES, MAT_LISTS)},
            address="http://host.robots.ox.ac.uk/pascal/VOC/voc2010/VOCtrainval_03-May-2010.tar",
            sha1="bf9985e9f2b064752bf6bd654d89f017c76c395a",
        ),
        MAT_ARCHIVE,
        Archive(
            file=str(JSON_LABELS),
            max_gigabytes=2,
            address="https://codalabuser.blob.core.windows.net/public/trainval_merged.json",
            sha1="169325d9f7e9047537fedca7b04de4dddf10b881",
            replaced_by=(str(LABELS), str(MAT_LABELS), MAT_ARCHIVE.file),
        ),
    ),
    conversion=conversion,
)
INFO_60 = replace(
    INFO,
    title="PASCAL Context, background scored",
    open=partial(PascalContext, protocol=60),
    classes=CLASSES_60,
    palette=PALETTE_60,
    how="the same files as pascal_context",
)
