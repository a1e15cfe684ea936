"""Your own data: a folder with images/ and masks/, a mask of the same name for every image.

Splits are lists (train.txt, val.txt, test.txt: a name a line), or folders (images/train/, masks/train/, ...), or, where
there are neither, a seeded share of the images is kept for val.

What the masks' values mean is said in classes.yaml beside them, in one of three ways:

    classes: [background, cat, dog]                     # values 0, 1, 2
    classes: {background: 0, cat: 255}                  # values as they are, here those of a black and white mask
    classes: {background: [0, 0, 0], cat: [192, 0, 0]}  # colours
    ignore: [255]                                       # values or colours not to look at; none if left out

Without that file every mask is looked at, and what was found is logged. Nothing is ignored that was not said or found:
a black and white mask under the first way is an error, not "background and ignore".
"""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from caaseg.data.decode import read_mask
from caaseg.data.labels import MAX_CLASSES, ColourTable, LabelTable, distinct_colours
from caaseg.data.pairs import IMAGE_SUFFIXES, MASK_SUFFIXES, Pair, PairDataset, by_stem, check_split, read_names
from caaseg.data.sample import IGNORE, BadFileError, Colour

log = logging.getLogger(__name__)

CLASSES_FILE = "classes.yaml"
SPLITS = ("train", "val", "test")

Value = int | Colour
"""What a mask stores for a class: a number, or a colour."""


@dataclass(frozen=True)
class Meaning:
    """What the values of a folder's masks stand for."""

    classes: dict[str, Value]
    """The value of each class, in the order of class ids."""
    ignore: tuple[Value, ...] = ()

    def reader(self) -> Callable[[Path], NDArray[np.uint8]]:
        """What reads a mask file into class ids."""
        ids = {value: k for k, value in enumerate(self.classes.values())} | dict.fromkeys(self.ignore, IGNORE)
        numbers = {value: k for value, k in ids.items() if isinstance(value, int)}
        if len(numbers) == len(ids):
            return LabelTable(numbers, advice=f"correct the mask, or add them to {CLASSES_FILE}").read
        return ColourTable({value: k for value, k in ids.items() if not isinstance(value, int)}).read

    def palette(self) -> tuple[Colour, ...]:
        made = distinct_colours(len(self.classes))
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
        check_split(str(root), split, splits_in(root))
        meaning = meaning or read_meaning(root)
        images, masks = _found(root / "images", IMAGE_SUFFIXES), _found(root / "masks", MASK_SUFFIXES)
        names = _names(root, split, images, val_fraction, seed)
        unlabelled = split == "test" and not any(name in masks for name in names)
        pairs = []
        for name in names:
            mask = None if unlabelled else masks.get(name, root / "masks" / f"{name}.png")
            pairs.append(Pair(name, images.get(name, root / "images" / f"{name}.jpg"), mask))
        super().__init__(
            pairs,
            classes=tuple(meaning.classes),
            palette=meaning.palette(),
            read_label=meaning.reader(),
            # A list may leave files out; otherwise each should have its partner.
            owned=() if _by_lists(root) else ((root / "images", "**/*"), (root / "masks", "**/*")),
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
        raise BadFileError(f"{path}: classes is {named!r}; expected names, or names with values or colours")
    for name in named:
        if not isinstance(name, str):  # YAML reads no and on as truth values
            raise BadFileError(f"{path}: the name {name!r} is not text; put it in quotes")
    values_of = named if isinstance(named, dict) else {name: value for value, name in enumerate(named)}
    classes = {name: _value(value, path) for name, value in values_of.items()}
    ignore = tuple(_value(value, path) for value in _listed(content.get("ignore"), path))
    values = [*classes.values(), *ignore]
    if len({isinstance(value, int) for value in values}) > 1:
        raise BadFileError(f"{path}: some values are numbers and some are colours; expected one or the other")
    if len(set(values)) < len(values) or len(classes) < len(named):
        raise BadFileError(f"{path}: a name or a value occurs twice; expected each once")
    if len(classes) > MAX_CLASSES:
        raise BadFileError(f"{path}: {len(classes)} classes; expected at most {MAX_CLASSES}")
    return Meaning(classes, ignore)


def look(root: Path) -> Meaning:
    """What the masks' values may stand for, by reading every mask; what is taken for what is logged.

    Only 0 and 255 are a black and white mask: two classes, never "a class and ignore". A mask that cannot be read tells
    nothing here; it is an error when its turn comes.
    """
    masks = _found(root / "masks", MASK_SUFFIXES).values()
    return _look(root, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in masks))


@lru_cache(maxsize=4)
def _look(root: Path, masks: tuple[tuple[Path, int, int], ...]) -> Meaning:
    """Times and sizes come along so that every split of a folder is answered by one look, until a mask changes."""
    found: set[int] = set()
    errors = []
    with ThreadPoolExecutor() as pool:
        for values in pool.map(_values, (path for path, _, _ in masks)):
            if isinstance(values, BadFileError):
                errors.append(values)
            else:
                found |= values
    if errors and not found:
        raise errors[0]
    how = f"write {root / CLASSES_FILE} to name the classes or to say otherwise"
    if found == {0, 255}:
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
    return Meaning({str(value): value for value in classes}, (IGNORE,) if IGNORE in found else ())


def _values(path: Path) -> set[int] | BadFileError:
    try:
        return set(np.unique(read_mask(path)).tolist())
    except BadFileError as error:
        return error


def _value(value: Any, path: Path) -> Value:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 16:
        return value
    if isinstance(value, list) and len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value):
        return value[0], value[1], value[2]
    raise BadFileError(f"{path}: {value!r} is no mask value; expected a whole number or a colour such as [192, 0, 0]")


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
