"""Lookup tables from stored mask values or colors to class ids. A value outside the table is an error."""

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from caaseg.data.decode import read_color_mask, read_mask
from caaseg.data.palette import MAX_CLASSES as MAX_CLASSES
from caaseg.data.palette import distinct_colors as distinct_colors
from caaseg.data.sample import BadFileError, Color

WRONG_FILE = "correct the mask, or check that it belongs to this dataset and version"
_UNKNOWN = 254  # table entry of values that are neither a class nor ignored


class LabelTable:
    """Map the stored values of index and palette masks to class ids.

    Args:
        ids: class id (or IGNORE) of each stored value.
        advice: what to do about a value outside the table or a mask of colors; the end of the error message.
    """

    def __init__(self, ids: Mapping[int, int], *, advice: str = WRONG_FILE) -> None:
        self._advice = advice
        self._known = sorted(ids)
        self._ids = np.full(max(256, self._known[-1] + 1), _UNKNOWN, dtype=np.uint8)
        self._ids[list(ids)] = list(ids.values())
        self._bytes = self._ids[:256].tobytes()

    def read(self, path: Path) -> NDArray[np.uint8]:
        """Read the class ids of a mask file, (H, W)."""
        return self.apply(read_mask(path, advice=self._advice), path)

    def apply(self, values: NDArray[Any], path: Path) -> NDArray[np.uint8]:
        """Return the class ids of stored values, (H, W); `path` is named if a value is outside the table."""
        if values.dtype == np.uint8:
            ids_bytes = bytearray(np.ascontiguousarray(values)).translate(self._bytes)  # much faster than indexing
            ids = np.frombuffer(ids_bytes, dtype=np.uint8).reshape(values.shape)
        else:
            in_range = (values >= 0) & (values < len(self._ids))
            ids = np.where(in_range, self._ids[np.where(in_range, values, 0)], np.uint8(_UNKNOWN))
        unknown = ids == _UNKNOWN
        if unknown.any():
            found, expected = abbreviate(np.unique(values[unknown]).tolist()), _ranges(self._known)
            raise BadFileError(
                f"{path}: label values {found} are outside the table; expected {expected}; {self._advice}"
            )
        return ids


class ColorTable:
    """Map the colors of RGB and palette masks to class ids."""

    def __init__(self, ids: Mapping[Color, int]) -> None:
        self._ids = np.full(1 << 24, _UNKNOWN, dtype=np.uint8)  # one entry per color, so that lookup is one gather
        for (red, green, blue), class_id in ids.items():
            self._ids[red << 16 | green << 8 | blue] = class_id

    def read(self, path: Path) -> NDArray[np.uint8]:
        """Read the class ids of a mask file, (H, W)."""
        pixels = read_color_mask(path)  # (H, W, 3)
        red, green, blue = (pixels[:, :, channel].astype(np.uint32) for channel in range(3))
        ids: NDArray[np.uint8] = self._ids[red << 16 | green << 8 | blue]
        unknown = ids == _UNKNOWN
        if unknown.any():
            colors = [tuple(color) for color in np.unique(pixels[unknown], axis=0).tolist()]
            raise BadFileError(
                f"{path}: colors {abbreviate(colors)} are outside the color table; correct the mask, or add them to "
                "the table, as a class or under ignore"
            )
        return ids


class ClassTable(NamedTuple):
    """Classes of a benchmark in the order of class ids."""

    values: tuple[int, ...]  # value of each class in the label files
    names: tuple[str, ...]
    palette: tuple[Color, ...]


def load_class_table(dataset: str) -> ClassTable:
    """Load the class table of a benchmark that the package ships. Classes without a color get a distinct one."""
    text = resources.files("caaseg.data.datasets").joinpath("tables", f"{dataset}.yaml").read_text(encoding="utf-8")
    table: dict[int, dict[str, Any]] = yaml.safe_load(text)
    default = distinct_colors(len(table))
    palette = tuple(tuple(entry.get("color", default[k])) for k, entry in enumerate(table.values()))
    return ClassTable(tuple(table), tuple(entry["name"] for entry in table.values()), palette)


def abbreviate(values: list[Any]) -> str:
    """Join the first eight values for a message."""
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"


def _ranges(values: Iterable[int]) -> str:
    """Format sorted integers as ranges: "0 to 3, 7, 9 to 12"."""
    ranges: list[list[int]] = []
    for value in values:
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges)
