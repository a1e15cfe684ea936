"""What is kept of a predicted picture: its labels, the picture under their colors, and how likely each class is."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from caaseg.data.decode import pillow_pixel_limit
from caaseg.data.sample import Color
from caaseg.drawing.sheet import overlay
from caaseg.files import atomic_write

JPEG_LIMIT = 65_500  # on a side; JPEG has no larger ones
ROWS_AT_ONCE = 256
QUALITY = 90


def save_labels(labels: NDArray[np.uint8], palette: Sequence[Color], path: Path, note: str) -> None:
    """Write class ids (H, W) as an indexed PNG: the values are the ids, the palette has their colors.

    Args:
        labels: class ids.
        palette: of class k at position k; other values are black.
        path: ends in .png.
        note: kept in the file, for `note_in`.
    """
    image = Image.fromarray(labels)
    colors = [value for color in palette for value in color]
    image.putpalette(colors + [0] * (3 * 256 - len(colors)))  # of full length, or else Pillow packs the values
    about = PngInfo()
    about.add_text("caaseg", note)
    with atomic_write(path) as aside:
        image.save(aside, pnginfo=about)


def note_in(path: Path) -> str | None:
    """The note of a label file; None where there is no such file, or another kind of file."""
    try:
        with pillow_pixel_limit(sys.maxsize), Image.open(path, formats=("PNG",)) as image:  # of which no pixel is read
            note = image.info.get("caaseg")
    except (OSError, SyntaxError, ValueError):
        return None
    return note if isinstance(note, str) else None


def is_too_long_for_jpeg(size: tuple[int, int]) -> bool:
    """Whether the overlay of a picture of this size has to be a PNG."""
    return max(size) > JPEG_LIMIT


def save_overlay(image: Tensor, labels: NDArray[np.uint8], palette: Sequence[Color], path: Path) -> None:
    """Write a picture (3, H, W) uint8 under the colors of its labels."""
    pixels = image.permute(1, 2, 0).numpy()
    covered = np.empty_like(pixels)
    for top in range(0, len(pixels), ROWS_AT_ONCE):  # few at once: the colors are mixed in 32 bits
        rows = slice(top, top + ROWS_AT_ONCE)
        covered[rows] = overlay(pixels[rows], labels[rows], palette)
    with atomic_write(path) as aside:
        Image.fromarray(covered).save(aside, quality=QUALITY, subsampling=0)  # colors keep their edges


class ProbabilityFile:
    """Probabilities as .npy, float16 of shape (H, W, K), written part by part; there when all were written.

    `numpy.load(path, mmap_mode="r")` reads any part of it without the rest.
    """

    def __init__(self, path: Path, size: tuple[int, int], num_classes: int) -> None:
        self._shape = (*size, num_classes)
        self._whole = atomic_write(path)

    def __enter__(self) -> "ProbabilityFile":
        self._file = self._whole.__enter__().open("wb")
        header = {"descr": "<f2", "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._start = self._file.tell()
        return self

    def write(self, rows: slice, columns: slice, probabilities: Tensor) -> None:
        """Put (K, h, w) in its place."""
        values = probabilities.permute(1, 2, 0).to(torch.float16).cpu().numpy().astype("<f2", order="C", copy=False)
        _, width, num_classes = self._shape
        for row, line in zip(range(rows.start, rows.stop), values, strict=True):
            self._file.seek(self._start + 2 * num_classes * (row * width + columns.start))
            self._file.write(line.tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._whole.__exit__(kind, error, trace)
