"""A sheet of samples: each image beside itself with its label laid over it, and a legend of the classes seen."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from numpy.typing import NDArray

from caaseg.data.sample import IGNORE, Color, Sample

WIDTH = 12.0  # inches
PAIRS_A_ROW = 2
LEGEND_COLUMNS = 6
PALEST = 96  # what a pixel's darkness keeps where a picture is the ground for marks, of 255


def draw_sheet(samples: Sequence[Sample], classes: Sequence[str], palette: Sequence[Color], title: str) -> Figure:
    """Pairs of image and overlay, two in a row. Ignored pixels are black in the overlay."""
    seen = np.unique(np.concatenate([np.unique(sample.label.numpy()) for sample in samples]))
    rows = -(-len(samples) // PAIRS_A_ROW)
    tallest = max(sample.label.shape[0] / sample.label.shape[1] for sample in samples)
    row_height = WIDTH / (2 * PAIRS_A_ROW) * tallest + 0.1
    legend_height = 0.3 + 0.22 * -(-len(seen) // LEGEND_COLUMNS)
    tight = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.04, hspace=0.01, wspace=0.01)
    figure = Figure(figsize=(WIDTH, 0.4 + rows * row_height + legend_height), layout=tight)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    axes = figure.subplots(rows, 2 * PAIRS_A_ROW, squeeze=False).reshape(-1, 2)
    for panels in axes:
        for panel in panels:
            panel.axis("off")
    for (plain, covered), sample in zip(axes, samples, strict=False):
        image = sample.image.permute(1, 2, 0).numpy()
        plain.imshow(image, interpolation="antialiased")
        plain.set_title(sample.name, fontsize=8, loc="left", pad=3)
        covered.imshow(overlay(image, sample.label.numpy(), palette), interpolation="antialiased")
    patches = [patch(classes[k], palette[k]) for k in seen if k != IGNORE]
    if IGNORE in seen:
        patches.append(patch("ignored", (0, 0, 0)))
    figure.legend(handles=patches, loc="outside lower left", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9)
    return figure


def overlay(
    image: NDArray[np.uint8], label: NDArray[np.uint8], palette: Sequence[Color], strength: float = 0.65
) -> NDArray[np.uint8]:
    """An image (H, W, 3) under the colors of its label (H, W)."""
    colors = np.zeros((256, 3), dtype=np.float32)  # ignored pixels are black
    colors[: len(palette)] = palette
    covered = (1 - strength) * image + strength * colors[label]
    covered[label == IGNORE] *= 1 - strength  # darker than any class
    return covered.round().astype(np.uint8)


def marked(
    image: NDArray[np.uint8], marks: Sequence[tuple[NDArray[np.bool_], Color]], label: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """An image (H, W, 3), pale and grey, with the pixels (H, W) of each mark in its color; ignored ones are black."""
    grey = image.mean(-1, keepdims=True)
    drawn: NDArray[np.uint8] = np.broadcast_to(255 - (255 - grey) * PALEST / 255, image.shape).astype(np.uint8)
    for pixels, color in marks:
        drawn[pixels] = color
    drawn[label == IGNORE] = 0
    return drawn


def patch(name: str, color: Color) -> Patch:
    """A color's entry in a legend."""
    red, green, blue = (value / 255 for value in color)
    return Patch(facecolor=(red, green, blue), edgecolor="#888888", linewidth=0.5, label=name)
