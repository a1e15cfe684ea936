"""From what a label file stores to class ids. A value outside the table is an error: guessing would mix up classes."""

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from caaseg.data.decode import read_color_mask, read_mask
from caaseg.data.sample import BadFileError, Color

MAX_CLASSES = 254
WRONG_FILE = "correct the mask, or check that it belongs to this dataset and version"
_OUTSIDE = 254  # not a class, not IGNORE: what a table answers for values it does not have


class LabelTable:
    """Raw label values to class ids, for index and palette masks."""

    def __init__(self, ids: Mapping[int, int], *, advice: str = WRONG_FILE) -> None:
        """Keep a table; `advice` is what to do about a value it does not have."""
        self._advice = advice
        self._known = sorted(ids)
        self._ids = np.full(max(256, self._known[-1] + 1), _OUTSIDE, dtype=np.uint8)
        self._ids[list(ids)] = list(ids.values())
        self._bytes = self._ids[:256].tobytes()

    def read(self, path: Path) -> NDArray[np.uint8]:
        """The class ids of a mask file, (H, W)."""
        return self.apply(read_mask(path), path)

    def apply(self, raw: NDArray[Any], path: Path) -> NDArray[np.uint8]:
        """The class ids of raw values, (H, W); `path` is who to blame for a value outside the table."""
        if raw.dtype == np.uint8:
            found = bytearray(np.ascontiguousarray(raw)).translate(self._bytes)  # several times faster than indexing
            ids = np.frombuffer(found, dtype=np.uint8).reshape(raw.shape)
        else:
            inside = (raw >= 0) & (raw < len(self._ids))
            ids = np.where(inside, self._ids[np.where(inside, raw, 0)], np.uint8(_OUTSIDE))
        outside = ids == _OUTSIDE
        if outside.any():
            stray = np.unique(raw[outside])
            raise BadFileError(
                f"{path}: label values {some(stray.tolist())} are outside the table; expected {_ranges(self._known)}; "
                f"{self._advice}"
            )
        return ids


class ColorTable:
    """Colors to class ids, for RGB and palette masks."""

    def __init__(self, ids: Mapping[Color, int]) -> None:
        self._ids = np.full(1 << 24, _OUTSIDE, dtype=np.uint8)  # one entry a color: looking up is one gather
        for (red, green, blue), class_id in ids.items():
            self._ids[red << 16 | green << 8 | blue] = class_id

    def read(self, path: Path) -> NDArray[np.uint8]:
        """The class ids of a mask file, (H, W)."""
        pixels = read_color_mask(path)
        red, green, blue = (pixels[:, :, channel].astype(np.uint32) for channel in range(3))
        ids: NDArray[np.uint8] = self._ids[red << 16 | green << 8 | blue]
        outside = ids == _OUTSIDE
        if outside.any():
            stray = [tuple(color) for color in np.unique(pixels[outside], axis=0).tolist()]
            raise BadFileError(
                f"{path}: colors {some(stray)} are outside the color table; correct the mask, or add them to the "
                "table, as a class or under ignore"
            )
        return ids


class Classes(NamedTuple):
    """The classes of a benchmark, in the order of training ids."""

    raw: tuple[int, ...]  # what the label files store for each
    names: tuple[str, ...]
    palette: tuple[Color, ...]


def shipped_classes(dataset: str) -> Classes:
    """A benchmark's table, shipped with the package. Where it names no colors, distinct ones are made."""
    text = resources.files("caaseg.data.datasets").joinpath("tables", f"{dataset}.yaml").read_text(encoding="utf-8")
    table: dict[int, dict[str, Any]] = yaml.safe_load(text)
    made = distinct_colors(len(table))
    palette = tuple(tuple(entry.get("color", made[k])) for k, entry in enumerate(table.values()))
    return Classes(tuple(table), tuple(entry["name"] for entry in table.values()), palette)


def distinct_colors(number: int) -> tuple[Color, ...]:
    """Colors that differ from each other and from black, which pictures keep for ignored pixels.

    The three lowest bits of an id become the highest bits of red, green and blue, and so on: PASCAL VOC's rule.
    """
    colors = []
    for k in range(1, number + 1):
        channels = [sum((k >> (3 * place + channel) & 1) << (7 - place) for place in range(3)) for channel in range(3)]
        colors.append((channels[0], channels[1], channels[2]))
    return tuple(colors)


def some(values: list[Any]) -> str:
    """The first few of many, for a message."""
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"


def _ranges(values: Iterable[int]) -> str:
    """0 to 3, 7, 9 to 12."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
