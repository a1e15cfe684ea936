"""Files that the app offers to save, at the size of the photo."""

import json
import re
import zipfile
from collections.abc import Collection
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from caaseg.analysis.pixel_attention import PixelAttention
from caaseg.app.predictions import AppModel
from caaseg.drawing.label_files import JPEG_QUALITY, ROWS_PER_BAND, save_labels
from caaseg.drawing.overlays import overlay
from caaseg.reports.pixel_attention import draw_lines, draw_reach


def write_labels(labels: NDArray[np.uint8], model: AppModel, path: Path) -> None:
    """Write class ids with a palette, as `caaseg predict` does."""
    save_labels(labels, model.palette, path, json.dumps({"model": model.name, "classes": model.classes}))


def write_overlay(
    image: Tensor, labels: NDArray[np.uint8], model: AppModel, path: Path, *, opacity: float, hidden: Collection[int]
) -> None:
    """Write the photo blended with the colors of its classes, as the page shows it.

    Args:
        image: the photo, (3, H, W) uint8.
        labels: class ids, (H, W).
        model: the model, for its palette.
        path: file name that ends in .jpg or .png.
        opacity: opacity of the colors, 0 to 1.
        hidden: classes whose pixels show the photo alone.
    """
    pixels = image.permute(1, 2, 0).numpy()
    drawn = np.empty_like(pixels)
    for top in range(0, len(pixels), ROWS_PER_BAND):  # in bands, because blending needs float32 temporaries
        rows = slice(top, top + ROWS_PER_BAND)
        blended = overlay(pixels[rows], labels[rows], model.palette, opacity)
        is_hidden = np.isin(labels[rows], list(hidden))
        drawn[rows] = np.where(is_hidden[..., None], pixels[rows], blended)
    Image.fromarray(drawn).save(path, quality=JPEG_QUALITY, subsampling=0)  # keeps color edges sharp


def write_masks(labels: NDArray[np.uint8], model: AppModel, path: Path) -> None:
    """Write a ZIP archive with one PNG per class that occurs: 255 for the pixels of the class, 0 for all others."""
    with zipfile.ZipFile(path, "w") as archive:  # PNG is compressed already
        for k in np.unique(labels).tolist():
            content = BytesIO()
            Image.fromarray(((labels == k) * np.uint8(255)).astype(np.uint8)).save(content, "PNG")
            archive.writestr(f"{k:03}_{file_name(model.classes[k])}.png", content.getvalue())


def write_attention(
    view: NDArray[np.uint8], attention: PixelAttention, position: tuple[float, float], path: Path
) -> None:
    """Write the attention of a pixel over the whole photo and, for axial attention, along its column and row beside it.

    Args:
        view: the photo, (H, W, 3).
        attention: attention of the pixel.
        position: vertical and horizontal position of the pixel, each as a fraction of the photo.
        path: file name that ends in .png.
    """
    pixel = (int(position[0] * view.shape[0]), int(position[1] * view.shape[1]))
    lines = draw_lines(view, attention, pixel)
    reach = draw_reach(view, attention, pixel)
    Image.fromarray(reach if lines is None else np.hstack([reach, lines])).save(path)


def file_name(text: str) -> str:
    """Return a text as part of a file name that every system accepts."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._") or "unnamed"
