"""What a pixel looks at, drawn on its image: for the page of `caaseg app`.

Pictures are (H, W, 3) uint8. Small images are enlarged by a whole factor, so that their pixels stay pixels.
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
from caaseg.drawing.sheet import overlay
from caaseg.models.heads.base import Head
from caaseg.models.segmenter import Segmenter
from caaseg.reports.page import templates

Picture = NDArray[np.uint8]

ENLARGED = 640
"""Pixels that the longer side of a small image is enlarged to, at most."""

COLUMN: Color = (86, 190, 240)
ROW: Color = (255, 158, 74)
GROUND = 0.45  # how bright the image is where nothing looks
DECADES = 3  # powers of ten between the brightest and nothing: most weights are far below the strongest
BARS = 6  # channels on each side of the chart of gates
ALIKE = 0.01  # gates that differ by less look the same as bars


def classes_of(model: Segmenter) -> tuple[tuple[str, ...], tuple[Color, ...]]:
    """Names and colors of a model's classes; made up where it was saved without."""
    config = model.config
    names = config.classes or tuple(f"class {k}" for k in range(config.num_classes))
    return names, config.palette or distinct_colors(config.num_classes)


def enlargement(height: int, width: int) -> int:
    """By what whole factor an image is drawn larger."""
    return max(1, ENLARGED // max(height, width))


def draw_overlay(
    image: Picture, labels: Tensor, palette: Sequence[Color], opacity: float, pixel: tuple[int, int]
) -> Picture:
    """The image under the colors of its classes, with a ring around a pixel."""
    return _ringed(_enlarged(overlay(image, labels.numpy(), palette, opacity)), pixel, enlargement(*labels.shape))


def draw_lines(image: Picture, looked: PixelAttention, pixel: tuple[int, int]) -> Picture | None:
    """The weights along the pixel's column and row as light on the image; None where there are no such lines."""
    if looked.column is None or looked.row is None:
        return None
    column, row = torch.zeros_like(looked.reach), torch.zeros_like(looked.reach)
    column[:, looked.cell[1]] = _brightness(looked.column)
    row[looked.cell[0]] = _brightness(looked.row)
    size = image.shape[:2]
    light = np.stack([_cells(column, size), _cells(row, size)])  # (2, H, W)
    colors = np.array([COLUMN, ROW], np.float32)
    total = light.sum(0)[..., None]
    color = np.einsum("khw,kc->hwc", light, colors) / np.maximum(total, 1e-9)
    drawn = _lit(image, light.max(0)[..., None], color)
    return _ringed(_enlarged(drawn), pixel, enlargement(*size))


def draw_reach(image: Picture, looked: PixelAttention, pixel: tuple[int, int]) -> Picture:
    """The weight of every place in the pixel's result as heat on the image, the strongest brightest."""
    heat = _cells(_brightness(looked.reach), image.shape[:2])
    color = 255 * matplotlib.colormaps["inferno"](0.3 + 0.65 * heat)[..., :3]
    return _ringed(_enlarged(_lit(image, heat[..., None], color)), pixel, enlargement(*image.shape[:2]))


def legend(labels: Tensor, names: Sequence[str], palette: Sequence[Color]) -> str:
    """The classes found, the most frequent first, with their shares, as HTML."""
    counts = torch.bincount(labels.flatten(), minlength=len(names)).tolist()
    order = sorted((k for k, count in enumerate(counts) if count), key=lambda k: -counts[k])
    found = [{"name": names[k], "color": palette[k], "share": counts[k] / labels.numel()} for k in order]
    return _part("legend", found)


def gate_chart(gates: Tensor) -> str:
    """The channels that the gates leave most of and least of, as bars in HTML."""
    order = gates.argsort(descending=True, stable=True).tolist()
    few = min(BARS, len(order) // 2) or 1
    strongest, weakest = ([(k, gates[k].item()) for k in ids] for ids in (order[:few], order[::-1][:few]))
    return _part("gates", strongest, weakest, len(order), strongest[0][1] - weakest[0][1] < ALIKE)


def pixel_note(
    looked: PixelAttention | None, head: Head, name: str, pixel: tuple[int, int], size: Sequence[int]
) -> str:
    """What is drawn, in words, as HTML."""
    return _part("note", _facts(looked, size[:2]), head.without_attention, name, pixel)


def message(text: str, *, problem: bool = False) -> str:
    """A sentence for the page, as HTML: a problem is announced as one."""
    return _part("message", text, problem)


def page_heading(models: Sequence[tuple[str, Segmenter]]) -> str:
    """What page this is, and of which models, as HTML."""
    return _part("heading", [(name, model.config) for name, model in models])


def _facts(looked: PixelAttention | None, size: Sequence[int]) -> dict[str, Any] | None:
    if looked is None:
        return None
    elsewhere = looked.reach.clone()
    elsewhere[looked.cell] = 0
    best = divmod(int(elsewhere.argmax()), elsewhere.shape[1])
    return {
        "own": looked.reach[looked.cell].item(),
        "next": elsewhere.max().item(),
        "where": [
            round(place * (length - 1) / max(1, count - 1))
            for place, length, count in zip(best, size, elsewhere.shape, strict=True)
        ],
        "lines": looked.column is not None,
    }


def _part(name: str, *given: Any) -> str:
    return str(getattr(templates().get_template("attended.html.j2").module, name)(*given)).strip()


def _brightness(weights: Tensor) -> Tensor:
    """From 0 to 1: one for the strongest weight, a third less for every power of ten below it."""
    return (1 + (weights / weights.max()).log10() / DECADES).clamp(min=0)


def _cells(values: Tensor, size: Sequence[int]) -> NDArray[np.float32]:
    """(h, w) -> (H, W): every pixel has the value of its cell, as `cell_of` has it."""
    rows, columns = (
        torch.linspace(0, count - 1, length).round().long() for count, length in zip(values.shape, size, strict=True)
    )
    spread: NDArray[np.float32] = values.float()[rows][:, columns].numpy()
    return spread


def _lit(image: Picture, light: NDArray[np.float32], color: NDArray[np.float64]) -> Picture:
    """The image, grey and dark, with color where there is light: (H, W, 3), (H, W, 1) and (H, W, 3)."""
    grey = GROUND * image.mean(-1, keepdims=True)
    shade = 0.75 + 0.25 * image.mean(-1, keepdims=True) / 255  # what is there stays visible under the color
    drawn: Picture = ((1 - light) * grey + light * color * shade).round().astype(np.uint8)
    return drawn


def _enlarged(picture: Picture) -> Picture:
    factor = enlargement(*picture.shape[:2])
    return picture.repeat(factor, 0).repeat(factor, 1)


def _ringed(picture: Picture, pixel: tuple[int, int], factor: int) -> Picture:
    """A ring around a pixel of the image that was enlarged, light and dark, to be seen on any ground."""
    drawn = Image.fromarray(picture)
    row, column = (factor * place + factor // 2 for place in pixel)
    pen = ImageDraw.Draw(drawn)
    radius = max(5, max(picture.shape) // 60)
    for extra, color, width in ((2, (0, 0, 0), 2), (0, (255, 255, 255), 3)):
        reach = radius + extra
        pen.ellipse((column - reach, row - reach, column + reach, row + reach), outline=color, width=width)
    return np.asarray(drawn)
