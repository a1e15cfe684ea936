"""Files of a prediction: label map as PNG, overlay as JPEG or PNG, class probabilities as .npy."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from caaseg.data.sample import Color
from caaseg.drawing.legend import add_legend
from caaseg.drawing.overlays import background_class, overlay
from caaseg.files import atomic_write

JPEG_MAX_SIDE = 65_500
ROWS_PER_BAND = 256
JPEG_QUALITY = 90


def save_labels(labels: NDArray[np.uint8], palette: Sequence[Color], path: Path, note: str) -> None:
    """Write class ids as an indexed PNG: pixel values are class ids, the palette holds the class colors.

    Args:
        labels: class ids, (H, W).
        palette: color of class k at position k; other values are black.
        path: file name that ends in .png.
        note: text stored in the file's metadata; Pillow returns it as image.info["caaseg"].
    """
    image = Image.fromarray(labels)
    colors = [value for color in palette for value in color]
    image.putpalette(colors + [0] * (3 * 256 - len(colors)))  # 256 entries: Pillow packs pixels of shorter palettes
    _save_png(image, path, note)


def save_source_values(
    labels: NDArray[np.uint8], values: Sequence[int] | Sequence[Color], path: Path, note: str
) -> None:
    """Write labels with the values of the training masks: a grayscale PNG of 8 or 16 bits, or an RGB PNG.

    Args:
        labels: class ids, (H, W).
        values: value or color of class k at position k.
        path: file name that ends in .png.
        note: text stored in the file's metadata; Pillow returns it as image.info["caaseg"].
    """
    table = np.array(values)  # (K,) values, or (K, 3) colors
    narrow = table.astype(np.uint8 if table.max() < 256 else np.uint16)
    _save_png(Image.fromarray(narrow[labels]), path, note)


def _save_png(image: Image.Image, path: Path, note: str) -> None:
    metadata = PngInfo()
    metadata.add_text("caaseg", note)
    with atomic_write(path) as temporary:
        image.save(temporary, pnginfo=metadata)


def exceeds_jpeg_limit(size: tuple[int, int]) -> bool:
    """Return whether an image of this size is too large for JPEG, so that its overlay must be a PNG."""
    return max(size) > JPEG_MAX_SIDE


def save_overlay(
    image: Tensor,
    labels: NDArray[np.uint8],
    palette: Sequence[Color],
    path: Path,
    classes: Sequence[str] | None = None,
    *,
    legend: bool = False,
) -> None:
    """Write an image blended with the colors of its labels. A class called background is transparent.

    Args:
        image: (3, H, W) uint8.
        labels: class ids, (H, W).
        palette: color of class k at position k.
        path: file name that ends in .jpg or .png.
        classes: name of class k at position k; None for numbers.
        legend: add the names and colors of the classes that occur, right of the image.
    """
    background = background_class(classes)
    pixels = image.permute(1, 2, 0).numpy()
    blended = np.empty_like(pixels)
    for top in range(0, len(pixels), ROWS_PER_BAND):  # in bands, because blending needs float32 temporaries
        rows = slice(top, top + ROWS_PER_BAND)
        blended[rows] = overlay(pixels[rows], labels[rows], palette, background=background)
    drawn = Image.fromarray(blended)
    if legend:
        names = classes or [str(k) for k in range(len(palette))]
        wider = add_legend(drawn, labels, names, palette)
        drawn = drawn if path.suffix == ".jpg" and exceeds_jpeg_limit(wider.size) else wider
    with atomic_write(path) as temporary:
        drawn.save(temporary, quality=JPEG_QUALITY, subsampling=0)  # keeps color edges sharp


class ProbabilityFile:
    """Write class probabilities tile by tile to a .npy file, float16 of shape (H, W, K).

    The file appears under its name when the context exits without an error. `numpy.load(path, mmap_mode="r")` reads
    parts of it without loading the rest.
    """

    def __init__(self, path: Path, size: tuple[int, int], num_classes: int) -> None:
        self._shape = (*size, num_classes)
        self._atomic = atomic_write(path)

    def __enter__(self) -> "ProbabilityFile":
        self._file = self._atomic.__enter__().open("wb")
        header = {"descr": "<f2", "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._start = self._file.tell()
        return self

    def write(self, rows: slice, columns: slice, probabilities: Tensor) -> None:
        """Write the probabilities (K, h, w) of one tile."""
        values = probabilities.permute(1, 2, 0).to(torch.float16).cpu().numpy().astype("<f2", order="C", copy=False)
        _, width, num_classes = self._shape
        for row, line in zip(range(rows.start, rows.stop), values, strict=True):
            self._file.seek(self._start + 2 * num_classes * (row * width + columns.start))
            self._file.write(line.tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._atomic.__exit__(kind, error, trace)
