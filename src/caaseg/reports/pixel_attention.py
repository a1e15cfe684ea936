"""Pixel attention drawn on its image.

Pictures are (H, W, 3) uint8. Small images are enlarged by an integer factor, without interpolation.
"""

from collections.abc import Sequence

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from caaseg.analysis.pixel_attention import PixelAttention
from caaseg.data.sample import Color

Picture = NDArray[np.uint8]

ENLARGED_SIDE = 640
"""Maximum length in pixels of the longer side of an enlarged image."""

COLUMN: Color = (86, 190, 240)
ROW: Color = (255, 158, 74)
BACKGROUND = 0.45  # brightness of the image without attention
DECADES = 3  # brightness is logarithmic over this many powers of ten, because most weights are small


def enlargement(height: int, width: int) -> int:
    """Return the integer factor by which an image is enlarged."""
    return max(1, ENLARGED_SIDE // max(height, width))


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
