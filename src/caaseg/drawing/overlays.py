"""Class colors over an image, marked pixels, and the entries of legends."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from caaseg.data.sample import IGNORE, Color

Legend = Sequence[tuple[str, Color]]

PALE_CONTRAST = 96 / 255  # contrast of an image in the background of marked pixels


def background_class(classes: Sequence[str] | None) -> int | None:
    """Return the id of the class called background, which overlays do not color, or None."""
    names = [name.lower() for name in classes or ()]
    return names.index("background") if "background" in names else None


def overlay(
    image: NDArray[np.uint8],
    label: NDArray[np.uint8],
    palette: Sequence[Color],
    opacity: float = 0.65,
    background: int | None = None,
) -> NDArray[np.uint8]:
    """Blend an image with the colors of its label. Ignored pixels are black.

    Args:
        image: (H, W, 3).
        label: class ids, (H, W).
        palette: color of class k at position k.
        opacity: opacity of the class colors, 0 to 1.
        background: id of a class that is transparent, from `background_class`.

    Returns:
        (H, W, 3).
    """
    colors = np.zeros((256, 3), dtype=np.float32)
    colors[: len(palette)] = palette
    blended = (1 - opacity) * image + opacity * colors[label]
    blended[label == IGNORE] *= 1 - opacity  # darker than any class
    if background is not None:
        blended = np.where((label == background)[..., None], image, blended)
    return blended.round().astype(np.uint8)


def mark_pixels(
    image: NDArray[np.uint8], marks: Sequence[tuple[NDArray[np.bool_], Color]], label: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Draw masks in their colors on a pale gray version of the image. Ignored pixels are black.

    Args:
        image: (H, W, 3).
        marks: pairs of a mask (H, W) and its color; later masks cover earlier ones.
        label: class ids, (H, W).

    Returns:
        (H, W, 3).
    """
    gray = image.mean(-1, keepdims=True)
    drawn: NDArray[np.uint8] = np.broadcast_to(255 - (255 - gray) * PALE_CONTRAST, image.shape).astype(np.uint8)
    for mask, color in marks:
        drawn[mask] = color
    drawn[label == IGNORE] = 0
    return drawn


def class_legend(labels: Sequence[Tensor], classes: Sequence[str], palette: Sequence[Color]) -> list[tuple[str, Color]]:
    """Return name and color of each class that occurs in labels or predictions, each (H, W), and of "ignored".

    A background class is left out: overlays do not color it.
    """
    present = np.unique(np.concatenate([np.unique(label.numpy()) for label in labels]))
    uncolored = (IGNORE, background_class(classes))
    entries: list[tuple[str, Color]] = [(classes[k], palette[k]) for k in present if k not in uncolored]
    return [*entries, ("ignored", (0, 0, 0))] if IGNORE in present else entries
