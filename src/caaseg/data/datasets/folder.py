"""Your own data: images, and one mask with the same name per image.

The images are in images/ and the masks in masks/ (or labels/, annotations/). The name of a mask may have an ending such
as _mask or _gt. Splits come from lists (train.txt, val.txt, test.txt: one name per line), or else from directories:
images/train/ and masks/train/, or train/images/ and train/masks/. With neither, a random fraction of the images, chosen
by the seed, becomes val. An image that is in train and in another split is an error.

classes.yaml defines the values of the masks: see mask_classes.py.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.datasets.mask_classes import CLASSES_FILE, MaskClasses, infer_mask_classes, read_classes_file
from caaseg.data.datasets.pairs import (
    IMAGE_SUFFIXES,
    MASK_SUFFIXES,
    Pair,
    PairDataset,
    check_split,
    files_by_stem,
    read_names,
)
from caaseg.data.labels import abbreviate
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError

SPLITS = ("train", "val", "test")
SPLIT_DIRECTORIES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Split of each directory name."""
MASK_DIRECTORIES = ("masks", "labels", "annotations")
MASK_ENDINGS = ("_mask", "_masks", "_gt", "_label", "_labels", "_seg", "-mask", ".mask")
"""Endings of mask names that the names of their images do not have."""
EXPORT_SUFFIXES = (".txt", ".json", ".xml", ".csv")


class Part(NamedTuple):
    """A directory of images and a directory of masks."""

    split: str  # empty if the directories hold all splits
    images: Path
    masks: Path


class Folder(PairDataset):
    """Images and masks in a directory. A test split may have no masks: its labels are all IGNORE.

    Args:
        root: directory with images/ and masks/, or with such directories per split.
        split: train, val or test.
        mask_classes: values of the masks; by default read from classes.yaml, or inferred from the masks.
        val_fraction: fraction of the images in val if neither lists nor subdirectories define the splits.
        seed: selects these images.
    """

    def __init__(
        self,
        root: Path,
        split: str,
        *,
        mask_classes: MaskClasses | None = None,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        parts = find_parts(root)
        for other in ("val.txt", "test.txt"):
            if (root / other).is_file() and not _has_lists(root):
                raise BadFileError(f"{root / other}: no train.txt next to it; write one too")
        check_split(str(root), split, splits_in(root))
        images = find_images(parts)
        masks = find_masks(parts, images)
        if not masks and split != "test":
            raise _no_masks_error(parts[0], images)
        mask_classes = mask_classes or read_mask_classes(root)
        self.mask_values = tuple(mask_classes.classes.values())
        """Value or color of class id k in the mask files, at position k."""
        names = _names(root, split, images, val_fraction, seed)
        has_masks = split != "test" or any(name in masks for name in names)

        def image_path(name: str) -> Path:
            part, stem = _part_of(parts, name)
            return images.get(name, part.images / f"{stem}.jpg")

        def mask_path(name: str) -> Path:
            part, stem = _part_of(parts, name)
            return masks.get(name, part.masks / f"{stem}.png")

        pairs = [Pair(name, image_path(name), mask_path(name) if has_masks else None) for name in names]
        images_by_split = {split: {pair.name: pair.image for pair in pairs}}
        for other in splits_in(root):
            if other != split:
                with suppress(BadFileError):  # an unreadable list is reported when its own split is opened
                    other_names = _names(root, other, images, val_fraction, seed)
                    images_by_split[other] = {name: image_path(name) for name in other_names}
        super().__init__(
            pairs,
            classes=tuple(mask_classes.classes),
            palette=mask_classes.palette(),
            read_label=mask_classes.reader(),
            # Lists may omit files; otherwise every file should be in a pair.
            file_globs=()
            if _has_lists(root)
            else [(directory, "**/*") for part in parts for directory in (part.images, part.masks)],
            problems=_overlaps(root, split, images_by_split) if pairs else [_empty_split(root, split, len(images))],
        )


def find_parts(root: Path) -> list[Part]:
    """Return the directories of images and masks: one part, or one per split."""
    parents = [("", root)]
    if not (root / "images").is_dir():
        parents = [
            (split, root / name) for name, split in SPLIT_DIRECTORIES.items() if (root / name / "images").is_dir()
        ]
    if not parents:
        raise CaasegError(
            f"{root / 'images'}: no such directory; expected images/ and masks/ in {root}, or train/images/ and "
            f"train/masks/; choose another directory, or convert a label export with caaseg data import"
        )
    parts = []
    for split, parent in parents:
        masks = next((parent / name for name in MASK_DIRECTORIES if (parent / name).is_dir()), parent / "masks")
        if not masks.is_dir() and split != "test":
            raise CaasegError(f"{masks}: no such directory; expected images/ and masks/ in {parent}; add the masks")
        parts.append(Part(split, parent / "images", masks))
    return parts


def find_images(parts: list[Part]) -> dict[str, Path]:
    """Return the image files by name, such as train/a."""
    return _named_files([(part, part.images) for part in parts], IMAGE_SUFFIXES)


def find_masks(parts: list[Part], images: Mapping[str, Path]) -> dict[str, Path]:
    """Return the mask files by the name of their image; endings such as _mask are removed."""
    masks = _named_files([(part, part.masks) for part in parts], MASK_SUFFIXES)
    renamed: dict[str, Path] = {}
    for name, path in masks.items():
        stripped = (name.removesuffix(ending) for ending in MASK_ENDINGS if name.endswith(ending))
        own = name if name in images else next((other for other in stripped if other in images), name)
        if own in renamed:
            raise BadFileError(f"{path}: {renamed[own].name} is a mask of the same image; expected one mask per image")
        renamed[own] = path
    return renamed


def splits_in(root: Path) -> tuple[str, ...]:
    """Return the splits of a directory."""
    if _has_lists(root):
        return tuple(split for split in SPLITS if (root / f"{split}.txt").is_file())
    if _has_split_directories(root):
        parent = root / "images" if (root / "images").is_dir() else root
        found = {split for name, split in SPLIT_DIRECTORIES.items() if (parent / name).is_dir()}
        return tuple(split for split in SPLITS if split in found)
    return ("train", "val")


def read_mask_classes(root: Path) -> MaskClasses:
    """Read classes.yaml, or infer the classes from the masks if it does not exist."""
    if (root / CLASSES_FILE).is_file():
        return read_classes_file(root / CLASSES_FILE)
    parts = find_parts(root)
    masks = [path for part in parts if part.masks.is_dir() for path in _find_files(part.masks, MASK_SUFFIXES).values()]
    if not masks:
        raise _no_masks_error(parts[0], find_images(parts))
    return infer_mask_classes(root, masks)


def _named_files(directories: list[tuple[Part, Path]], suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of all parts by name. A split directory such as valid/ gets the name of its split."""
    found = {}
    for part, directory in directories:
        has_splits = part.split == "" and (directory / "train").is_dir()
        for stem, path in _find_files(directory, suffixes).items():
            first, slash, rest = stem.partition("/")
            if part.split:
                name = f"{part.split}/{stem}"
            else:
                name = f"{SPLIT_DIRECTORIES.get(first, first)}/{rest}" if has_splits and slash else stem
            found[name] = path
    return found


def _part_of(parts: list[Part], name: str) -> tuple[Part, str]:
    """Return the part that a name belongs to, and the rest of the name."""
    split, _, stem = name.partition("/")
    return next(((part, stem) for part in parts if part.split and part.split == split), (parts[0], name))


def _find_files(directory: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return all files below a directory by relative path without suffix; hidden directories are skipped."""
    found = {}
    for parent in [directory, *sorted(directory.rglob("*/"))]:
        if not any(part.startswith(".") for part in parent.relative_to(directory).parts):
            for stem, path in files_by_stem(parent, suffixes).items():
                found[(parent / stem).relative_to(directory).as_posix()] = path
    return found


def _has_split_directories(root: Path) -> bool:
    return ((root / "images" if (root / "images").is_dir() else root) / "train").is_dir()


def _has_lists(root: Path) -> bool:
    return (root / "train.txt").is_file()


def _names(root: Path, split: str, images: dict[str, Path], val_fraction: float, seed: int) -> list[str]:
    """Return the names of the samples of a split."""
    if _has_lists(root):
        lines = read_names(root / f"{split}.txt", "write it")
        suffixes = IMAGE_SUFFIXES + MASK_SUFFIXES
        return [Path(n).with_suffix("").as_posix() if Path(n).suffix.lower() in suffixes else n for n in lines]
    names = sorted(images)
    if _has_split_directories(root):
        return [name for name in names if name.startswith(f"{split}/")]
    if not 0 < val_fraction < 1:
        raise CaasegError(f"val_fraction is {val_fraction}; expected a number between 0 and 1")

    def random_key(name: str) -> bytes:  # of the name alone: an added image changes the split of few others
        return hashlib.sha256(f"{seed}/{name}".encode()).digest()

    val = set(sorted(names, key=random_key)[: max(1, round(len(names) * val_fraction))])
    return [name for name in names if (name in val) == (split == "val")]


def _no_masks_error(part: Part, images: Mapping[str, Path]) -> BadFileError:
    directory = part.masks
    suffixes = _count_suffixes(directory)
    if not images:
        advice = f"put images into {part.images}, which has none either, and their masks here"
    elif suffixes.keys() & {".jpg", ".jpeg"}:
        advice = (
            "JPEG changes the values and is refused: export the masks again as PNG; converting the JPEG files would "
            "keep the changed values"
        )
    elif suffixes.keys() & set(EXPORT_SUFFIXES):
        advice = "convert a label export with caaseg data import"
    else:
        advice = "save the masks as PNG and put them here"
    return BadFileError(
        f"{directory}: no masks found, {_format_counts(suffixes)}; expected one mask per image, with the "
        f"same name and ending in {', '.join(MASK_SUFFIXES)}; {advice}"
    )


def _empty_split(root: Path, split: str, number: int) -> str:
    """Return the error message of a split without images in a directory with `number` images."""
    if _has_lists(root):
        return f"{root / f'{split}.txt'}: no names, so {split} has no images; expected one name per line; add some"
    directory = root / "images"
    if number and not (directory / "train").is_dir():
        images = "one image" if number == 1 else f"{number} images"
        return (
            f"{root}: {images}: {split} has none, because all are in val; expected at least two, one to train on and "
            "one to evaluate on; add images, or list those of each split in train.txt and val.txt"
        )
    directory = directory / split if number else directory
    return (
        f"{directory}: no images found, {_format_counts(_count_suffixes(directory))}; expected files that end in "
        f"{', '.join(IMAGE_SUFFIXES)}; put at least one here"
    )


def _overlaps(root: Path, split: str, images_by_split: Mapping[str, Mapping[str, Path]]) -> Iterator[str]:
    """Yield the error messages of images in train and another split; the same messages for both splits."""
    # Links are resolved: a directory of links to training images is not another set of images.
    files = {key: {os.path.realpath(path): name for name, path in own.items()} for key, own in images_by_split.items()}
    for other in (key for key in ("val", "test") if key in files):  # val and test may overlap
        if split not in ("train", other) or "train" not in files:
            continue
        both = [(name, files[other][file]) for file, name in files["train"].items() if file in files[other]]
        if both:
            names = [name if name == other_name else f"{name} ({other_name})" for name, other_name in both]
            sources = f"train.txt and {other}.txt" if _has_lists(root) else f"train and {other}"
            yield (
                f"{root}: images in both {sources}: {abbreviate(names)}; expected each in one split, because scores on "
                "training images are too high; list each in one of the two"
            )


def _count_suffixes(directory: Path) -> Counter[str]:
    """Count the files below a directory by suffix; hidden files are skipped."""
    return Counter(
        path.suffix.lower() or "without suffix"
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )


def _format_counts(suffixes: Counter[str]) -> str:
    counts = ", ".join(f"{number} {suffix}" for suffix, number in suffixes.most_common())
    return f"only other files ({counts})" if counts else "the directory is empty"


INFO = DatasetInfo(
    title="your own images and masks",
    open=Folder,
    splits=splits_in,
    image_size="any size",
    how="put images into images/, masks of the same names into masks/, and define the classes in classes.yaml",
)
