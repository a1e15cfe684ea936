"""PASCAL Context: photographs of VOC2010 with every pixel labelled, scored over 59 classes or, with background, 60.

Labels come as MATLAB files (trainval/), as run lengths in trainval_merged.json, or converted before: PNG files in
VOCdevkit/VOC2010/SegmentationClassContext with 0 for background and 1 to 59 for the classes, which both protocols
read. The two sources were rasterized differently and do not agree in every pixel; source.txt beside the split's lists
says which was used.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import Pair, PairDataset, check_split, names_in, read_names
from caaseg.data.labels import LabelTable, distinct_colors, shipped_classes
from caaseg.data.prepare.convert import Conversion
from caaseg.data.prepare.mat import read_mat
from caaseg.data.rle import decode_rle
from caaseg.data.sample import IGNORE, BadFileError

CLASSES = shipped_classes("pascal_context")
CLASSES_60 = ("background", *CLASSES.names)
PALETTE_60 = (distinct_colors(60)[-1], *CLASSES.palette)
RAW_CLASSES = 459  # of which 59 are scored and the others background

VOC = Path("VOCdevkit/VOC2010")
IMAGES = VOC / "JPEGImages"
LABELS = VOC / "SegmentationClassContext"
LISTS = VOC / "ImageSets" / "SegmentationContext"
MAT_LABELS = Path("trainval")
MAT_LISTS = VOC / "ImageSets" / "Main"
JSON_LABELS = VOC / "trainval_merged.json"

TO_CONVERTED = LabelTable(dict.fromkeys(range(RAW_CLASSES + 1), 0) | {raw: k + 1 for k, raw in enumerate(CLASSES.raw)})


class PascalContext(PairDataset):
    """PASCAL Context, converted. Background is ignored with 59 classes and class 0 with 60; scores do not compare."""

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
            owned=((root / LABELS, "*.png"),),
        )


def conversion(root: Path) -> Conversion | None:
    """What is to be made of the MATLAB files, or else of the JSON file; None if it is there."""
    if (root / LABELS).is_dir():
        return None
    if (root / MAT_LABELS).is_dir():
        return _from_mat(root)
    return _from_json(root, root / JSON_LABELS)


def _from_mat(root: Path) -> Conversion:
    names = {split: read_names(root / MAT_LISTS / f"{split}.txt", "unpack VOC2010") for split in PascalContext.splits}
    sources = {name: root / MAT_LABELS / f"{name}.mat" for split in names.values() for name in split}
    absent = sources.keys() - {name.removesuffix(".mat") for name in names_in(root / MAT_LABELS)}
    if absent:
        raise BadFileError(
            f"{root / MAT_LABELS}: no label map for {len(absent)} of {len(sources)} images, such as {min(absent)}.mat; "
            "expected one an image; unpack the archive again"
        )
    return Conversion(
        target=root / LABELS, sources=sources, read=labels_from_mat, lists=_lists(root, names, "trainval/*.mat")
    )


def labels_from_mat(path: Path) -> NDArray[np.uint8]:
    """A label map with 0 for background and 1 to 59 for the classes."""
    return TO_CONVERTED.apply(read_mat(path, "LabelMap"), path)


class Regions(NamedTuple):
    """What the JSON file says of one image."""

    where: Path  # for a message: the JSON file, and the image's name as if inside it
    height: int
    width: int
    regions: list[tuple[int, str | list[int]]]  # raw id and run lengths; later ones lie on top


def _from_json(root: Path, path: Path) -> Conversion:
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
            f"{path}: no such file, and no folder {root / MAT_LABELS} either; expected the labels in one of them; "
            "run caaseg data prepare pascal_context"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFileError(
            f"{path}: not the labels of PASCAL in Detail ({type(error).__name__}: {error}); "
            "expected images and annos_segmentation; fetch the file again"
        ) from error
    return Conversion(
        target=root / LABELS, sources=sources, read=labels_from_regions, lists=_lists(root, names, path.name)
    )


def labels_from_regions(image: Regions) -> NDArray[np.uint8]:
    """A label map with 0 for background and 1 to 59 for the classes."""
    raw = np.zeros((image.height, image.width), dtype=np.int64)
    for category, counts in image.regions:
        try:
            raw[decode_rle(counts, image.height, image.width)] = category
        except (ValueError, TypeError, OverflowError) as error:
            raise BadFileError(f"{image.where}: a damaged region ({error}); fetch the file again") from error
    return TO_CONVERTED.apply(raw, image.where)


def _lists(root: Path, names: dict[str, list[str]], source: str) -> dict[Path, str]:
    texts = {root / LISTS / f"{split}.txt": "\n".join(listed) + "\n" for split, listed in names.items()}
    return {**texts, root / LISTS / "source.txt": f"{source}\n"}
