"""Legend as a panel of pixels, for overlays and videos."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from caaseg.data.sample import Color
from caaseg.drawing.overlays import background_class

MIN_LINE = 12  # pixels


def add_legend(
    image: Image.Image, labels: NDArray[np.uint8], classes: Sequence[str], palette: Sequence[Color]
) -> Image.Image:
    """Return an overlay with the names, colors and shares of its classes at the right, the largest share first.

    Args:
        image: the overlay.
        labels: class ids, (H, W).
        classes: name of class k at position k.
        palette: color of class k at position k.
    """
    counts = np.bincount(labels.reshape(-1), minlength=len(classes))
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda k: -counts[k])
    background = background_class(classes)
    entries = [(f"{classes[k]}  {counts[k] / labels.size:.1%}", None if k == background else palette[k]) for k in order]
    legend = draw_legend(entries, image.height)
    canvas = Image.new("RGB", (image.width + legend.width, max(image.height, legend.height)), "white")
    canvas.paste(image)
    canvas.paste(legend, (image.width, 0))
    return canvas


def draw_legend(entries: Sequence[tuple[str, Color | None]], height: int) -> Image.Image:
    """Draw names beside squares of their colors, in as many columns as the height needs.

    Args:
        entries: names and colors; a class without a color gets an empty square.
        height: minimum height of the panel.
    """
    line = max(MIN_LINE, min(height // 20, height // (len(entries) + 1)))
    per_column = max(1, height // line - 1)
    font = ImageFont.load_default(0.7 * line)
    columns = [entries[k : k + per_column] for k in range(0, len(entries), per_column)]
    widths = [round(max(font.getlength(name) for name, _ in column)) + 3 * line for column in columns]
    panel = Image.new("RGB", (sum(widths), max(height, 2 * line)), "white")
    draw = ImageDraw.Draw(panel)
    for index, column in enumerate(columns):
        left = sum(widths[:index]) + line // 2
        for k, (name, color) in enumerate(column):
            top = line // 2 + k * line
            draw.rectangle((left, top, left + line - 4, top + line - 4), fill=color or "white", outline="black")
            draw.text((left + 1.5 * line, top - 1), name, fill="black", font=font)
    return panel
