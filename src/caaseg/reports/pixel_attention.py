"""Pixel attention drawn on its image, and the HTML parts of the page of `caaseg app`.

Pictures are (H, W, 3) uint8. Small images are enlarged by an integer factor, without interpolation.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from caaseg.analysis.pixel_attention import PixelAttention
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import Color
from caaseg.drawing.overlays import overlay
from caaseg.models.heads.base import Head
from caaseg.models.segmenter import Segmenter
from caaseg.reports.page import templates

Picture = NDArray[np.uint8]

ENLARGED_SIDE = 640
"""Maximum length in pixels of the longer side of an enlarged image."""

COLUMN: Color = (86, 190, 240)
ROW: Color = (255, 158, 74)
BACKGROUND = 0.45  # brightness of the image without attention
DECADES = 3  # brightness is logarithmic over this many powers of ten, because most weights are small
BARS = 6  # channels on each side of the chart of gates
MIN_GATE_RANGE = 0.01  # below, gates are reported as equal instead of drawn as bars


def classes_of(model: Segmenter) -> tuple[tuple[str, ...], tuple[Color, ...]]:
    """Return names and colors of a model's classes, or generated ones if it was saved without."""
    config = model.config
    names = config.classes or tuple(f"class {k}" for k in range(config.num_classes))
    return names, config.palette or distinct_colors(config.num_classes)


def enlargement(height: int, width: int) -> int:
    """Return the integer factor by which an image is enlarged."""
    return max(1, ENLARGED_SIDE // max(height, width))


def draw_overlay(
    image: Picture, labels: Tensor, palette: Sequence[Color], opacity: float, pixel: tuple[int, int]
) -> Picture:
    """Draw the image under its class colors, with a ring around a pixel."""
    return _enlarge_with_ring(overlay(image, labels.numpy(), palette, opacity), pixel)


def draw_lines(image: Picture, attention: PixelAttention, pixel: tuple[int, int]) -> Picture | None:
    """Draw the weights along the pixel's column and row on the image. None for heads without axial attention."""
    if attention.column is None or attention.row is None:
        return None
    column, row = torch.zeros_like(attention.reach), torch.zeros_like(attention.reach)
    column[:, attention.cell[1]] = _brightness(attention.column)
    row[attention.cell[0]] = _brightness(attention.row)
    light = np.stack([_upsample(values, image.shape[:2]) for values in (column, row)])  # (2, H, W)
    total = light.sum(0)[..., None]
    color = np.einsum("khw,kc->hwc", light, np.array([COLUMN, ROW], np.float32)) / np.maximum(total, 1e-9)
    return _enlarge_with_ring(_blend(image, light.max(0)[..., None], color), pixel)


def draw_reach(image: Picture, attention: PixelAttention, pixel: tuple[int, int]) -> Picture:
    """Draw the weight of every position as a heat map on the image."""
    heat = _upsample(_brightness(attention.reach), image.shape[:2])
    color = 255 * matplotlib.colormaps["inferno"](0.3 + 0.65 * heat)[..., :3]
    return _enlarge_with_ring(_blend(image, heat[..., None], color), pixel)


def legend(labels: Tensor, names: Sequence[str], palette: Sequence[Color]) -> str:
    """Return the predicted classes with their shares of pixels, most frequent first, as HTML."""
    counts = torch.bincount(labels.flatten(), minlength=len(names)).tolist()
    order = sorted((k for k, count in enumerate(counts) if count), key=lambda k: -counts[k])
    found = [{"name": names[k], "color": palette[k], "share": counts[k] / labels.numel()} for k in order]
    return _render("legend", found)


def gate_chart(gates: Tensor) -> str:
    """Return the channels with the largest and smallest gates as bars, in HTML."""
    order = gates.argsort(descending=True, stable=True).tolist()
    bars = min(BARS, len(order) // 2) or 1
    largest, smallest = ([(k, gates[k].item()) for k in ids] for ids in (order[:bars], order[::-1][:bars]))
    return _render("gates", largest, smallest, len(order), largest[0][1] - smallest[0][1] < MIN_GATE_RANGE)


def pixel_note(
    attention: PixelAttention | None, head: Head, name: str, pixel: tuple[int, int], size: Sequence[int]
) -> str:
    """Return class and main weights of a pixel as HTML, or a text about heads without pixel attention."""
    facts: dict[str, Any] | None = None
    if attention is not None:
        others = attention.reach.clone()
        others[attention.cell] = 0
        best = divmod(int(others.argmax()), others.shape[1])
        facts = {
            "own": attention.reach[attention.cell].item(),
            "next": others.max().item(),
            "where": [
                round(position * (length - 1) / max(1, cells - 1))
                for position, length, cells in zip(best, size[:2], others.shape, strict=True)
            ],
            "lines": attention.column is not None,
        }
    return _render("note", facts, head.without_attention, name, pixel)


def message(text: str, *, problem: bool = False) -> str:
    """Return a sentence as HTML; a problem gets the ARIA role "alert"."""
    return _render("message", text, problem)


def page_heading(models: Sequence[tuple[str, Segmenter]]) -> str:
    """Return title and models of the page as HTML."""
    return _render("heading", [(name, model.config) for name, model in models])


def _render(macro: str, *arguments: Any) -> str:
    return str(getattr(templates().get_template("pixel_attention.html.j2").module, macro)(*arguments)).strip()


def _brightness(weights: Tensor) -> Tensor:
    """Scale weights to 0 to 1, logarithmically: 1 for the largest, 1 / DECADES less for every power of ten below."""
    return (1 + (weights / weights.max()).log10() / DECADES).clamp(min=0)


def _upsample(values: Tensor, size: Sequence[int]) -> NDArray[np.float32]:
    """(h, w) -> (H, W): nearest neighbor with aligned corners, as `nearest_cell`."""
    rows, columns = (
        torch.linspace(0, cells - 1, length).round().long() for cells, length in zip(values.shape, size, strict=True)
    )
    upsampled: NDArray[np.float32] = values.float()[rows][:, columns].numpy()
    return upsampled


def _blend(image: Picture, light: NDArray[np.float32], color: NDArray[np.float64]) -> Picture:
    """Blend a dark gray image (H, W, 3) with a color (H, W, 3), weighted by light (H, W, 1)."""
    gray = image.mean(-1, keepdims=True)
    shade = 0.75 + 0.25 * gray / 255  # keeps the image visible under the color
    blended: Picture = ((1 - light) * BACKGROUND * gray + light * color * shade).round().astype(np.uint8)
    return blended


def _enlarge_with_ring(picture: Picture, pixel: tuple[int, int]) -> Picture:
    """Enlarge a picture and draw a ring around a pixel, white on black to be visible on any background."""
    factor = enlargement(*picture.shape[:2])
    drawn = Image.fromarray(picture.repeat(factor, 0).repeat(factor, 1))
    row, column = (factor * position + factor // 2 for position in pixel)
    canvas = ImageDraw.Draw(drawn)
    radius = max(5, max(drawn.size) // 60)
    for extra, color, width in ((2, (0, 0, 0), 2), (0, (255, 255, 255), 3)):
        r = radius + extra
        canvas.ellipse((column - r, row - r, column + r, row + r), outline=color, width=width)
    return np.asarray(drawn)
