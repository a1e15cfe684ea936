"""Classes of your own masks: read from classes.yaml, or inferred from the masks.

classes.yaml next to images/ and masks/ defines the values of the masks in one of four ways:

    classes: [background, cat, dog]                     # values 0, 1, 2
    classes: {0: background, 1: cat}                    # the same, by value
    classes: {background: 0, cat: 255}                  # any values, here those of a black and white mask
    classes: {background: [0, 0, 0], cat: [192, 0, 0]}  # colors
    ignore: [255]                                       # optional: values or colors to ignore

Without that file, the classes are inferred from all masks and logged. No value is ignored unless it is listed under
`ignore` or inferred. With the first form, a mask of 0 and 255 is therefore an error; 255 does not mean "ignore". RGB
masks with three equal channels are read as one channel.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.config import has_surrogates
from caaseg.data.decode import read_color_mask, read_mask
from caaseg.data.labels import MAX_CLASSES, ColorTable, LabelTable, abbreviate, distinct_colors
from caaseg.data.sample import IGNORE, BadFileError, Color
from caaseg.errors import CaasegError
from caaseg.files import read_yaml

logger = logging.getLogger(__name__)

CLASSES_FILE = "classes.yaml"
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
    """Whether RGB masks of only black and white are accepted and read as 0 and 255. False for inferred class ids,
    because the meaning of 255 is unclear there."""

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


class ValueCount(NamedTuple):
    """How often a value or color occurs in the masks."""

    value: Value
    share: float
    """Fraction of all pixels."""
    masks: int
    """Number of masks that contain it."""


def read_classes_file(path: Path) -> MaskClasses:
    """Read a classes.yaml."""
    try:
        content = read_yaml(path, "correct it")
    except CaasegError as error:
        raise BadFileError(str(error)) from error
    if not isinstance(content, dict) or not content.get("classes") or content.keys() - {"classes", "ignore"}:
        raise BadFileError(f"{path}: expected only classes: and optionally ignore:; correct it")
    named, ignored = content["classes"], content.get("ignore")
    ignored = [] if ignored is None else ignored
    if not isinstance(named, list | dict):
        raise BadFileError(f"{path}: classes is {named!r}; expected names, or names with values or colors")
    if not isinstance(ignored, list):
        raise BadFileError(f"{path}: ignore is {ignored!r}; expected a list such as [255]")
    if isinstance(named, dict) and all(type(key) is int and isinstance(name, str) for key, name in named.items()):
        pairs = [(name, value) for value, name in named.items()]  # given as value: name
    else:
        pairs = list(named.items()) if isinstance(named, dict) else [(name, k) for k, name in enumerate(named)]
    for name, _ in pairs:
        if not isinstance(name, str):  # YAML reads `no` and `on` as booleans
            raise BadFileError(f"{path}: the name {name!r} is not text; put it in quotes")
        if has_surrogates(name):
            raise BadFileError(f"{path}: the name {name!r} is not valid Unicode; correct it")
    classes = {name: _parse_value(value, path) for name, value in pairs}
    ignore = tuple(_parse_value(value, path) for value in ignored)
    values = [*classes.values(), *ignore]
    if len({isinstance(value, int) for value in values}) > 1:
        raise BadFileError(f"{path}: some values are integers and some are colors; expected one or the other")
    if len(set(values)) < len(values) or len(classes) < len(pairs):
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


def infer_mask_classes(root: Path, masks: Iterable[Path]) -> MaskClasses:
    """Infer the classes by reading every mask, and log the result.

    If the masks contain only 0 and 255, these become two classes; 255 is not ignored. If all masks are in color, each
    color becomes a class. Unreadable masks are skipped here and reported when they are loaded.

    Args:
        root: directory of the dataset, for messages.
        masks: all mask files.
    """
    return _infer(root, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in masks))


@lru_cache(maxsize=4)
def _infer(root: Path, masks: tuple[tuple[Path, int, int], ...]) -> MaskClasses:
    """Infer the classes from masks (path, modification time, size). The result is cached until a mask changes."""
    values, errors = _values_in(path for path, _, _ in masks)
    if errors and values <= BLACK_AND_WHITE:
        more, errors = _values_in(errors, black_and_white=True)
        values |= more
    if errors and not values:
        return _infer_colors(root, next(iter(errors.values())), [path for path, _, _ in masks])
    advice = f"run caaseg data init {quote(str(root))} to name the classes or to change this"
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
        raise BadFileError(f"{root}: no mask with a value other than {IGNORE} (ignore); expected class ids")
    if len(classes) > MAX_CLASSES or classes[-1] >= 1 << 16:
        raise BadFileError(
            f"{root}: masks with {len(classes)} different values up to {classes[-1]}; expected at most {MAX_CLASSES} "
            f"classes; list the values of the classes in {CLASSES_FILE}"
        )
    ignored = f"{IGNORE} is ignored" if IGNORE in values else "nothing is ignored"
    listed = ", ".join(map(str, classes))
    logger.warning("%s: found %d classes in the masks, values %s; %s; %s", root, len(classes), listed, ignored, advice)
    ignore = (IGNORE,) if IGNORE in values else ()
    return MaskClasses({str(value): value for value in classes}, ignore, black_and_white=values <= BLACK_AND_WHITE)


def _infer_colors(root: Path, error: BadFileError, paths: Sequence[Path]) -> MaskClasses:
    """Return one class per color. If no mask is in color either, raise `error`, the error of the first mask."""
    readable = [counts for counts in _map(_count_colors, paths) if isinstance(counts, dict)]
    colors = {color for counts in readable for color in counts if not isinstance(color, int)}
    if not colors:
        raise error
    if len(colors) > MAX_CLASSES:
        raise BadFileError(
            f"{root}: masks with {len(colors)} different colors; expected one color per class, at most {MAX_CLASSES}; "
            "export the masks without smoothing and as PNG"
        )
    names = {"#{:02x}{:02x}{:02x}".format(*color): color for color in sorted(colors)}
    listed = abbreviate(list(names))
    logger.warning(
        "%s: found %d colors in the masks, one class each: %s; nothing is ignored; name them with caaseg data init %s",
        root,
        len(names),
        listed,
        quote(str(root)),
    )
    return MaskClasses(dict(names))


def count_values(masks: Sequence[Path]) -> list[ValueCount]:
    """Return how often each value, or each color, occurs in the masks, the most frequent first."""
    results: list[dict[Value, int] | BadFileError] = list(_map(_count_ids, masks))
    if any(isinstance(result, BadFileError) for result in results):
        results = list(_map(_count_colors, masks))
    pixels: dict[Value, int] = {}
    files: dict[Value, int] = {}
    for result in results:
        if isinstance(result, BadFileError):
            raise result
        for value, number in result.items():
            pixels[value] = pixels.get(value, 0) + number
            files[value] = files.get(value, 0) + 1
    total = sum(pixels.values())
    counts = [ValueCount(value, number / total, files[value]) for value, number in pixels.items()]
    return sorted(counts, key=lambda count: -count.share)


def classes_text(counts: Sequence[ValueCount], number_of_masks: int) -> str:
    """Return a classes.yaml with one line per value, for the user to edit."""
    values = sorted(count.value for count in counts if count.value != IGNORE or len(counts) == 2)
    by_value = {count.value: count for count in counts}
    is_binary = set(values) == BLACK_AND_WHITE
    lines = ["# Rename the classes. To ignore a value, move it to the list ignore.", "classes:"]
    for k, value in enumerate(values):
        name = ("background", "foreground")[k] if is_binary else f"class_{k}"
        stored = str(value) if isinstance(value, int) else str(list(value))
        share = (
            f"{100 * by_value[value].share:.2f}% of the pixels, in {by_value[value].masks} of {number_of_masks} masks"
        )
        lines.append(f"  {name}: {stored}  # {share}")
    ignored = [count.value for count in counts if count.value not in values]
    lines.append(f"ignore: {ignored}")
    return "\n".join(lines) + "\n"


def _values_in(paths: Iterable[Path], *, black_and_white: bool = False) -> tuple[set[int], dict[Path, BadFileError]]:
    """Return the values of all masks, and the error of each unreadable mask."""
    paths = list(paths)
    values: set[int] = set()
    errors: dict[Path, BadFileError] = {}
    for path, result in zip(paths, _map(partial(_count_ids, black_and_white=black_and_white), paths), strict=True):
        if isinstance(result, BadFileError):
            errors[path] = result
        else:
            values |= {value for value in result if isinstance(value, int)}
    return values, errors


def _map(count: Callable[[Path], dict[Value, int]], paths: Iterable[Path]) -> Iterable[dict[Value, int] | BadFileError]:
    """Yield the counts of each mask, or its error if it is unreadable."""

    def result_of(path: Path) -> dict[Value, int] | BadFileError:
        try:
            return count(path)
        except BadFileError as error:
            return error

    with ThreadPoolExecutor() as threads:
        yield from threads.map(result_of, paths)


def _count_ids(path: Path, black_and_white: bool = True) -> dict[Value, int]:
    values, counts = np.unique(_read_values(path, black_and_white), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _count_colors(path: Path) -> dict[Value, int]:
    pixels = read_color_mask(path).astype(np.uint32)  # (H, W, 3)
    values, counts = np.unique(pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2], return_counts=True)
    colors: list[Value] = [(value >> 16, value >> 8 & 255, value & 255) for value in values.tolist()]
    return dict(zip(colors, counts.tolist(), strict=True))


def _read_values(path: Path, black_and_white: bool) -> NDArray[Any]:
    return read_mask(path, gray_rgb=True, black_and_white=black_and_white, advice=COLOR_ADVICE)


def _read_ids(path: Path, *, table: LabelTable, black_and_white: bool) -> NDArray[np.uint8]:
    """Read class ids. A function of the module, because it is pickled for spawned workers."""
    return table.apply(_read_values(path, black_and_white), path)
