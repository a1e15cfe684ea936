"""Your own data: a directory with images/ and masks/, and one mask with the same name per image.

Splits come from lists (train.txt, val.txt, test.txt: one name per line), or else from subdirectories (images/train/,
masks/train/, ...). With neither, a random fraction of the images, chosen by the seed, becomes val. An image that is in
train and in another split is an error.

classes.yaml next to images/ and masks/ defines the values of the masks in one of three ways:

    classes: [background, cat, dog]                     # values 0, 1, 2
    classes: {background: 0, cat: 255}                  # any values, here those of a black and white mask
    classes: {background: [0, 0, 0], cat: [192, 0, 0]}  # colors
    ignore: [255]                                       # optional: values or colors to ignore

Without that file the classes are inferred from all masks and logged. No value is ignored unless it is listed or
inferred: a black and white mask with the first form is an error, not "background and ignore". Black and white masks
saved as RGB are read as 0 and 255.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.datasets.pairs import (
    IMAGE_SUFFIXES,
    MASK_SUFFIXES,
    Pair,
    PairDataset,
    check_split,
    files_by_stem,
    read_names,
)
from caaseg.data.decode import read_mask
from caaseg.data.labels import MAX_CLASSES, ColorTable, LabelTable, abbreviate, distinct_colors
from caaseg.data.sample import IGNORE, BadFileError, Color
from caaseg.errors import CaasegError

logger = logging.getLogger(__name__)

CLASSES_FILE = "classes.yaml"
SPLITS = ("train", "val", "test")
BLACK_AND_WHITE = {0, 255}
COLOR_ADVICE = (
    f"save the mask this way, or give the color of each class in {CLASSES_FILE}, such as: "
    "classes: {background: [0, 0, 0], cat: [192, 0, 0]}"
)

Value = int | Color
"""Stored value of a class in a mask: an integer or a color."""


@dataclass(frozen=True)
class MaskClasses:
    """Classes and ignored values of the masks."""

    classes: dict[str, Value]
    """Stored value of each class, in the order of class ids."""
    ignore: tuple[Value, ...] = ()
    black_and_white: bool = True
    """Whether black and white RGB masks are read, as 0 and 255. False for inferred class ids, where 255 is unclear."""

    def reader(self) -> Callable[[Path], NDArray[np.uint8]]:
        """Return a function that reads the class ids of a mask file, (H, W)."""
        ids = {value: k for k, value in enumerate(self.classes.values())} | dict.fromkeys(self.ignore, IGNORE)
        integers = {value: k for value, k in ids.items() if isinstance(value, int)}
        if len(integers) == len(ids):
            table = LabelTable(integers, advice=f"correct the mask, or add them to {CLASSES_FILE}")
            return partial(_read_ids, table=table, black_and_white=self.black_and_white)
        return ColorTable({value: k for value, k in ids.items() if not isinstance(value, int)}).read

    def palette(self) -> tuple[Color, ...]:
        default = distinct_colors(len(self.classes))
        return tuple(default[k] if isinstance(v, int) else v for k, v in enumerate(self.classes.values()))


class Folder(PairDataset):
    """Images and masks in a directory. A test split may have no masks: its labels are all IGNORE.

    Args:
        root: directory with images/ and masks/.
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
        for directory in (root / "images", root / "masks"):
            if not directory.is_dir():
                raise CaasegError(f"{directory}: no such directory; expected images/ and masks/ in {root}; see --root")
        for other in ("val.txt", "test.txt"):
            if (root / other).is_file() and not _has_lists(root):
                raise BadFileError(f"{root / other}: no train.txt next to it; write one, or remove this list too")
        check_split(str(root), split, splits_in(root))
        images, masks = _find_files(root / "images", IMAGE_SUFFIXES), _find_files(root / "masks", MASK_SUFFIXES)
        if not masks and split != "test":
            raise _no_masks_error(root)
        mask_classes = mask_classes or read_mask_classes(root)
        names = _names(root, split, images, val_fraction, seed)
        has_masks = split != "test" or any(name in masks for name in names)

        def image_path(name: str) -> Path:
            return images.get(name, root / "images" / f"{name}.jpg")

        pairs = []
        for name in names:
            mask = masks.get(name, root / "masks" / f"{name}.png") if has_masks else None
            pairs.append(Pair(name, image_path(name), mask))
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
            file_globs=() if _has_lists(root) else ((root / "images", "**/*"), (root / "masks", "**/*")),
            problems=_overlaps(root, split, images_by_split) if pairs else [_empty_split(root, split, len(images))],
        )


def splits_in(root: Path) -> tuple[str, ...]:
    """Return the splits of a directory."""
    if _has_lists(root):
        return tuple(split for split in SPLITS if (root / f"{split}.txt").is_file())
    if (root / "images" / "train").is_dir():
        return tuple(split for split in SPLITS if (root / "images" / split).is_dir())
    return ("train", "val")


def read_mask_classes(root: Path) -> MaskClasses:
    """Read classes.yaml, or infer the classes from the masks if it does not exist."""
    path = root / CLASSES_FILE
    if not path.is_file():
        return infer_mask_classes(root)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadFileError(f"{path}: cannot be read as YAML ({error}); correct it or remove it") from error
    if not isinstance(content, dict) or not content.get("classes") or content.keys() - {"classes", "ignore"}:
        raise BadFileError(f"{path}: expected only classes: and optionally ignore:; correct it or remove it")
    named, ignored = content["classes"], content.get("ignore")
    ignored = [] if ignored is None else ignored
    if not isinstance(named, list | dict):
        raise BadFileError(f"{path}: classes is {named!r}; expected names, or names with values or colors")
    if not isinstance(ignored, list):
        raise BadFileError(f"{path}: ignore is {ignored!r}; expected a list such as [255]")
    for name in named:
        if not isinstance(name, str):  # YAML reads no and on as booleans
            raise BadFileError(f"{path}: the name {name!r} is not text; put it in quotes")
    values_by_name = named if isinstance(named, dict) else {name: value for value, name in enumerate(named)}
    classes = {name: _parse_value(value, path) for name, value in values_by_name.items()}
    ignore = tuple(_parse_value(value, path) for value in ignored)
    values = [*classes.values(), *ignore]
    if len({isinstance(value, int) for value in values}) > 1:
        raise BadFileError(f"{path}: some values are integers and some are colors; expected one or the other")
    if len(set(values)) < len(values) or len(classes) < len(named):
        raise BadFileError(f"{path}: a name or a value occurs twice; expected each once")
    if len(classes) > MAX_CLASSES:
        raise BadFileError(f"{path}: {len(classes)} classes; expected at most {MAX_CLASSES}")
    return MaskClasses(classes, ignore)


def _parse_value(value: Any, path: Path) -> Value:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 16:
        return value
    if isinstance(value, list) and len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value):
        return value[0], value[1], value[2]
    raise BadFileError(f"{path}: {value!r} is not a mask value; expected an integer or a color such as [192, 0, 0]")


def infer_mask_classes(root: Path) -> MaskClasses:
    """Infer the classes by reading every mask, and log the result.

    Masks of 0 and 255 only are black and white: two classes, never "one class and ignore". Unreadable masks are skipped
    here and reported when they are loaded. So are color masks, unless all masks are black and white.
    """
    masks = _find_files(root / "masks", MASK_SUFFIXES).values()
    if not masks:
        raise _no_masks_error(root)
    return _infer(root, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in masks))


@lru_cache(maxsize=4)
def _infer(root: Path, masks: tuple[tuple[Path, int, int], ...]) -> MaskClasses:
    """Infer the classes from (path, modification time, size) of each mask: cached for all splits until one changes."""
    values, errors = _values_in(path for path, _, _ in masks)
    if errors and values <= BLACK_AND_WHITE:
        more, errors = _values_in(errors, black_and_white=True)
        values |= more
    if errors and not values:
        raise next(iter(errors.values()))
    advice = f"write {root / CLASSES_FILE} to name the classes or to change this"
    if values == BLACK_AND_WHITE:
        logger.warning(
            "%s: the masks hold only 0 and 255: read as two classes, background (0) and foreground (255), "
            "with nothing ignored; %s",
            root,
            advice,
        )
        return MaskClasses({"background": 0, "foreground": 255})
    classes = sorted(values - {IGNORE})
    if not classes:
        raise BadFileError(f"{root / 'masks'}: no mask with a value other than {IGNORE} (ignore); expected class ids")
    if len(classes) > MAX_CLASSES or classes[-1] >= 1 << 16:
        raise BadFileError(
            f"{root / 'masks'}: {len(classes)} different values up to {classes[-1]}; expected at most {MAX_CLASSES} "
            f"classes; {advice}"
        )
    ignored = f"{IGNORE} is ignored" if IGNORE in values else "nothing is ignored"
    listed = ", ".join(map(str, classes))
    logger.warning("%s: found %d classes in the masks, values %s; %s; %s", root, len(classes), listed, ignored, advice)
    ignore = (IGNORE,) if IGNORE in values else ()
    return MaskClasses({str(value): value for value in classes}, ignore, black_and_white=values <= BLACK_AND_WHITE)


def _values_in(paths: Iterable[Path], *, black_and_white: bool = False) -> tuple[set[int], dict[Path, BadFileError]]:
    """Return the values of all masks, and the error of each unreadable mask."""

    def values_of(path: Path) -> tuple[Path, set[int] | BadFileError]:
        try:
            return path, set(np.unique(_read_values(path, black_and_white)).tolist())
        except BadFileError as error:
            return path, error

    values: set[int] = set()
    errors: dict[Path, BadFileError] = {}
    with ThreadPoolExecutor() as threads:
        for path, result in threads.map(values_of, paths):
            if isinstance(result, BadFileError):
                errors[path] = result
            else:
                values |= result
    return values, errors


def _read_values(path: Path, black_and_white: bool) -> NDArray[Any]:
    return read_mask(path, black_and_white=black_and_white, advice=COLOR_ADVICE)


def _read_ids(path: Path, *, table: LabelTable, black_and_white: bool) -> NDArray[np.uint8]:
    """Read class ids. Not a closure, because spawned workers receive it pickled."""
    return table.apply(_read_values(path, black_and_white), path)


def _find_files(directory: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return all files below a directory by relative path without suffix; hidden directories are skipped."""
    found = {}
    for parent in [directory, *sorted(directory.rglob("*/"))]:
        if not any(part.startswith(".") for part in parent.relative_to(directory).parts):
            for stem, path in files_by_stem(parent, suffixes).items():
                found[(parent / stem).relative_to(directory).as_posix()] = path
    return found


def _has_lists(root: Path) -> bool:
    return (root / "train.txt").is_file()


def _names(root: Path, split: str, images: dict[str, Path], val_fraction: float, seed: int) -> list[str]:
    """Return the names of the samples of a split."""
    if _has_lists(root):
        lines = read_names(root / f"{split}.txt", "write it")
        suffixes = IMAGE_SUFFIXES + MASK_SUFFIXES
        return [Path(n).with_suffix("").as_posix() if Path(n).suffix.lower() in suffixes else n for n in lines]
    names = sorted(images)
    if (root / "images" / "train").is_dir():
        return [name for name in names if name.startswith(f"{split}/")]
    if not 0 < val_fraction < 1:
        raise CaasegError(f"val_fraction is {val_fraction}; expected a number between 0 and 1")

    def random_key(name: str) -> bytes:  # depends on the name only, so that adding an image moves few others
        return hashlib.sha256(f"{seed}/{name}".encode()).digest()

    val = set(sorted(names, key=random_key)[: max(1, round(len(names) * val_fraction))])
    return [name for name in names if (name in val) == (split == "val")]


def _no_masks_error(root: Path) -> BadFileError:
    directory = root / "masks"
    suffixes = _count_suffixes(directory)
    if not _find_files(root / "images", IMAGE_SUFFIXES):
        advice = f"put images into {root / 'images'}, which has none either, and their masks here"
    elif suffixes.keys() & {".jpg", ".jpeg"}:
        advice = (
            "JPEG changes the values and is refused: export the masks again as PNG; converting the JPEG files would "
            "keep the changed values"
        )
    else:
        advice = "save the masks as PNG and put them here"
    return BadFileError(
        f"{directory}: no masks found, {_format_counts(suffixes)}; expected one mask with the same name per image, "
        f"that ends in {', '.join(MASK_SUFFIXES)}; {advice}"
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
        f"{', '.join(IMAGE_SUFFIXES)}; put at least one here for each split, or remove the directory of an unused split"
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
                "training images are too high; remove each from one of the two"
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
