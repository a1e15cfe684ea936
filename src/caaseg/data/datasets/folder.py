"""Your own data: a folder with images/ and masks/, a mask of the same name for every image.

Splits are lists (train.txt, val.txt, test.txt: a name a line), or folders (images/train/, masks/train/, ...), or, where
there are neither, a seeded share of the images is kept for val. An image of train in another split is a fault.

What the masks' values mean is said in classes.yaml beside them, in one of three ways:

    classes: [background, cat, dog]                     # values 0, 1, 2
    classes: {background: 0, cat: 255}                  # values as they are, here those of a black and white mask
    classes: {background: [0, 0, 0], cat: [192, 0, 0]}  # colors
    ignore: [255]                                       # values or colors not to look at; none if left out

Without that file every mask is looked at, and what was found is logged. Nothing is ignored that was not said or found:
a black and white mask under the first way is an error, not "background and ignore". Black and white may be saved as
RGB: its values are 0 and 255 all the same.
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

from caaseg.data.datasets.pairs import (
    IMAGE_SUFFIXES,
    MASK_SUFFIXES,
    Pair,
    PairDataset,
    by_stem,
    check_split,
    read_names,
)
from caaseg.data.decode import read_mask
from caaseg.data.labels import MAX_CLASSES, ColorTable, LabelTable, distinct_colors, some
from caaseg.data.sample import IGNORE, BadFileError, Color

log = logging.getLogger(__name__)

CLASSES_FILE = "classes.yaml"
SPLITS = ("train", "val", "test")
BLACK_AND_WHITE = {0, 255}
COLOR_ADVICE = (
    f"save the mask so, or give the color of each class in {CLASSES_FILE}, such as: "
    "classes: {background: [0, 0, 0], cat: [192, 0, 0]}"
)

Value = int | Color
"""What a mask stores for a class: a number, or a color."""


@dataclass(frozen=True)
class Meaning:
    """What the values of a folder's masks stand for."""

    classes: dict[str, Value]
    """The value of each class, in the order of class ids."""
    ignore: tuple[Value, ...] = ()
    black_and_white: bool = True
    """Whether RGB masks of black and white are read, as 0 and 255. Among masks of class ids nobody said what 255 is."""

    def reader(self) -> Callable[[Path], NDArray[np.uint8]]:
        """What reads a mask file into class ids."""
        ids = {value: k for k, value in enumerate(self.classes.values())} | dict.fromkeys(self.ignore, IGNORE)
        numbers = {value: k for value, k in ids.items() if isinstance(value, int)}
        if len(numbers) == len(ids):
            table = LabelTable(numbers, advice=f"correct the mask, or add them to {CLASSES_FILE}")
            return partial(_read_ids, table=table, black_and_white=self.black_and_white)
        return ColorTable({value: k for value, k in ids.items() if not isinstance(value, int)}).read

    def palette(self) -> tuple[Color, ...]:
        made = distinct_colors(len(self.classes))
        return tuple(made[k] if isinstance(v, int) else v for k, v in enumerate(self.classes.values()))


class Folder(PairDataset):
    """Images and masks in a folder. A test split may come without masks: its samples carry IGNORE."""

    def __init__(
        self,
        root: Path,
        split: str,
        *,
        meaning: Meaning | None = None,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        """List a split.

        Args:
            root: the folder that holds images/ and masks/.
            split: train, val or test.
            meaning: what the masks' values stand for; read from classes.yaml, or found by looking, when not given.
            val_fraction: share of the images kept for val where neither lists nor folders say it.
            seed: which images these are.
        """
        for folder in (root / "images", root / "masks"):
            if not folder.is_dir():
                raise ValueError(f"{folder}: no such folder; expected images/ and masks/ in {root}; see --root")
        for other in ("val.txt", "test.txt"):
            if (root / other).is_file() and not _by_lists(root):
                raise BadFileError(f"{root / other}: no train.txt beside it; write one, or remove this list too")
        check_split(str(root), split, splits_in(root))
        images, masks = _found(root / "images", IMAGE_SUFFIXES), _found(root / "masks", MASK_SUFFIXES)
        if not masks and split != "test":
            raise _no_masks(root)
        meaning = meaning or read_meaning(root)
        names = _names(root, split, images, val_fraction, seed)
        unlabelled = split == "test" and not any(name in masks for name in names)

        def image_of(name: str) -> Path:
            return images.get(name, root / "images" / f"{name}.jpg")

        pairs = []
        for name in names:
            mask = None if unlabelled else masks.get(name, root / "masks" / f"{name}.png")
            pairs.append(Pair(name, image_of(name), mask))
        images_of = {split: {pair.name: pair.image for pair in pairs}}
        for other in splits_in(root):
            if other != split:
                with suppress(BadFileError):  # a list that cannot be read is an error when its own turn comes
                    others = _names(root, other, images, val_fraction, seed)
                    images_of[other] = {name: image_of(name) for name in others}
        super().__init__(
            pairs,
            classes=tuple(meaning.classes),
            palette=meaning.palette(),
            read_label=meaning.reader(),
            # A list may leave files out; otherwise each should have its partner.
            owned=() if _by_lists(root) else ((root / "images", "**/*"), (root / "masks", "**/*")),
            faults=[_empty(root, split, len(images))] if not pairs else _shared(root, split, images_of),
        )


def splits_in(root: Path) -> tuple[str, ...]:
    """The splits of a folder."""
    if _by_lists(root):
        return tuple(split for split in SPLITS if (root / f"{split}.txt").is_file())
    if (root / "images" / "train").is_dir():
        return tuple(split for split in SPLITS if (root / "images" / split).is_dir())
    return ("train", "val")


def read_meaning(root: Path) -> Meaning:
    """What classes.yaml says, or what looking at all masks tells."""
    path = root / CLASSES_FILE
    if not path.is_file():
        return look(root)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadFileError(f"{path}: cannot be read as YAML ({error}); correct it or remove it") from error
    if not isinstance(content, dict) or not content.get("classes") or content.keys() - {"classes", "ignore"}:
        raise BadFileError(f"{path}: expected classes: and perhaps ignore:, and nothing else; correct it or remove it")
    named = content["classes"]
    if not isinstance(named, list | dict):
        raise BadFileError(f"{path}: classes is {named!r}; expected names, or names with values or colors")
    for name in named:
        if not isinstance(name, str):  # YAML reads no and on as truth values
            raise BadFileError(f"{path}: the name {name!r} is not text; put it in quotes")
    values_of = named if isinstance(named, dict) else {name: value for value, name in enumerate(named)}
    classes = {name: _value(value, path) for name, value in values_of.items()}
    ignore = tuple(_value(value, path) for value in _listed(content.get("ignore"), path))
    values = [*classes.values(), *ignore]
    if len({isinstance(value, int) for value in values}) > 1:
        raise BadFileError(f"{path}: some values are numbers and some are colors; expected one or the other")
    if len(set(values)) < len(values) or len(classes) < len(named):
        raise BadFileError(f"{path}: a name or a value occurs twice; expected each once")
    if len(classes) > MAX_CLASSES:
        raise BadFileError(f"{path}: {len(classes)} classes; expected at most {MAX_CLASSES}")
    return Meaning(classes, ignore)


def look(root: Path) -> Meaning:
    """What the masks' values may stand for, by reading every mask; what is taken for what is logged.

    Only 0 and 255 are a black and white mask: two classes, never "a class and ignore". A mask that cannot be read tells
    nothing here; it is an error when its turn comes. So is a mask in colors, unless all masks are black and white.
    """
    masks = _found(root / "masks", MASK_SUFFIXES).values()
    if not masks:
        raise _no_masks(root)
    return _look(root, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in masks))


@lru_cache(maxsize=4)
def _look(root: Path, masks: tuple[tuple[Path, int, int], ...]) -> Meaning:
    """Times and sizes come along so that every split of a folder is answered by one look, until a mask changes."""
    found, errors = _values_in(path for path, _, _ in masks)
    if errors and found <= BLACK_AND_WHITE:
        more, errors = _values_in(errors, black_and_white=True)
        found |= more
    if errors and not found:
        raise next(iter(errors.values()))
    how = f"write {root / CLASSES_FILE} to name the classes or to say otherwise"
    if found == BLACK_AND_WHITE:
        log.warning(
            "%s: the masks hold only 0 and 255: read as two classes, background (0) and foreground (255), "
            "with nothing ignored; %s",
            root,
            how,
        )
        return Meaning({"background": 0, "foreground": 255})
    classes = sorted(found - {IGNORE})
    if not classes:
        raise BadFileError(f"{root / 'masks'}: no mask with a value other than {IGNORE} (ignore); expected class ids")
    if len(classes) > MAX_CLASSES or classes[-1] >= 1 << 16:
        raise BadFileError(
            f"{root / 'masks'}: {len(classes)} different values up to {classes[-1]}; expected at most {MAX_CLASSES} "
            f"classes; {how}"
        )
    ignored = f"{IGNORE} is ignored" if IGNORE in found else "nothing is ignored"
    listed = ", ".join(map(str, classes))
    log.warning("%s: found %d classes by looking, values %s; %s; %s", root, len(classes), listed, ignored, how)
    ignore = (IGNORE,) if IGNORE in found else ()
    return Meaning({str(value): value for value in classes}, ignore, black_and_white=found <= BLACK_AND_WHITE)


def _values_in(paths: Iterable[Path], *, black_and_white: bool = False) -> tuple[set[int], dict[Path, BadFileError]]:
    """The values of all masks together, and what is wrong with each that cannot be read."""

    def values(path: Path) -> tuple[Path, set[int] | BadFileError]:
        try:
            return path, set(np.unique(_read_raw(path, black_and_white)).tolist())
        except BadFileError as error:
            return path, error

    found: set[int] = set()
    errors: dict[Path, BadFileError] = {}
    with ThreadPoolExecutor() as pool:
        for path, held in pool.map(values, paths):
            if isinstance(held, BadFileError):
                errors[path] = held
            else:
                found |= held
    return found, errors


def _read_raw(path: Path, black_and_white: bool) -> NDArray[Any]:
    return read_mask(path, black_and_white=black_and_white, advice=COLOR_ADVICE)


def _read_ids(path: Path, *, table: LabelTable, black_and_white: bool) -> NDArray[np.uint8]:
    """Not a closure: workers that are spawned get it pickled."""
    return table.apply(_read_raw(path, black_and_white), path)


def _value(value: Any, path: Path) -> Value:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 16:
        return value
    if isinstance(value, list) and len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value):
        return value[0], value[1], value[2]
    raise BadFileError(f"{path}: {value!r} is no mask value; expected a whole number or a color such as [192, 0, 0]")


def _listed(values: Any, path: Path) -> list[Any]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise BadFileError(f"{path}: ignore is {values!r}; expected a list such as [255]")
    return values


def _found(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The files of a folder and the folders in it, by path without ending."""
    found = {}
    for place in [folder, *sorted(folder.rglob("*/"))]:
        if any(part.startswith(".") for part in place.relative_to(folder).parts):
            continue  # what editors and notebooks keep
        for stem, path in by_stem(place, suffixes).items():
            found[(place / stem).relative_to(folder).as_posix()] = path
    return found


def _no_masks(root: Path) -> BadFileError:
    """What to say of a folder of masks without any."""
    folder = root / "masks"
    endings = _endings(folder)
    if not _found(root / "images", IMAGE_SUFFIXES):
        advice = f"put images into {root / 'images'}, which has none either, and their masks here"
    elif endings.keys() & {".jpg", ".jpeg"}:
        advice = (
            "JPEG changes the values and is not taken: export the masks again as PNG, since a converted JPEG keeps the "
            "changed values"
        )
    else:
        advice = "save the masks as PNG and put them here"
    return BadFileError(
        f"{folder}: no masks found, {_counted(endings)}; expected a mask of the same name for each image, that ends in "
        f"{', '.join(MASK_SUFFIXES)}; {advice}"
    )


def _empty(root: Path, split: str, number: int) -> str:
    """What to say of a split without images, in a folder with so many."""
    if _by_lists(root):
        return f"{root / f'{split}.txt'}: no names, so {split} has no images; expected a name a line; write some"
    folder = root / "images"
    if number and not (folder / "train").is_dir():
        images = "one image" if number == 1 else f"{number} images"
        return (
            f"{root}: {images}: {split} has none, since all are kept for val; expected at least two, one to learn from "
            "and one to score; give at least two images, or name those of each split in train.txt and val.txt"
        )
    folder = folder / split if number else folder
    return (
        f"{folder}: no images found, {_counted(_endings(folder))}; expected files that end in "
        f"{', '.join(IMAGE_SUFFIXES)}; put at least one here for each split, or remove the folder of a split not needed"
    )


def _shared(root: Path, split: str, images_of: Mapping[str, Mapping[str, Path]]) -> Iterator[str]:
    """What to say where a split has images of train; in the same words whichever of the two is asked about."""
    # Links are followed: a folder of links to training images is no other set of images.
    files = {key: {os.path.realpath(path): name for name, path in own.items()} for key, own in images_of.items()}
    for other in (key for key in ("val", "test") if key in files):  # these two may be one: neither is learned from
        if split not in ("train", other) or "train" not in files:
            continue
        both = [(name, files[other][file]) for file, name in files["train"].items() if file in files[other]]
        if both:
            names = [name if name == theirs else f"{name} ({theirs})" for name, theirs in both]
            places = f"train.txt and {other}.txt" if _by_lists(root) else f"train and {other}"
            yield (
                f"{root}: images in both {places}: {some(names)}; expected each in one split, since a score on images "
                "that were learned from flatters; remove each from one of the two"
            )


def _endings(folder: Path) -> Counter[str]:
    """How many files of each ending are in a folder and the folders in it; hidden ones do not count."""
    return Counter(
        path.suffix.lower() or "without ending"
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _counted(endings: Counter[str]) -> str:
    held = ", ".join(f"{number} {ending}" for ending, number in endings.most_common())
    return f"only other files ({held})" if held else "the folder is empty"


def _by_lists(root: Path) -> bool:
    return (root / "train.txt").is_file()


def _names(root: Path, split: str, images: dict[str, Path], val_fraction: float, seed: int) -> list[str]:
    if _by_lists(root):
        listed = read_names(root / f"{split}.txt", "write it")
        ends = IMAGE_SUFFIXES + MASK_SUFFIXES
        return [Path(line).with_suffix("").as_posix() if Path(line).suffix.lower() in ends else line for line in listed]
    names = sorted(images)
    if (root / "images" / "train").is_dir():
        return [name for name in names if name.startswith(f"{split}/")]
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}; expected a share between 0 and 1")

    def draw(name: str) -> bytes:  # by the name, so that an image added later moves few others
        return hashlib.sha256(f"{seed}/{name}".encode()).digest()

    kept = set(sorted(names, key=draw)[: max(1, round(len(names) * val_fraction))])
    return [name for name in names if (name in kept) == (split == "val")]
