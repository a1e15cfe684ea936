"""Default colors of classes, which stay distinguishable with and without color blindness."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from caaseg.data.sample import Color

MAX_CLASSES = 254
Colors = NDArray[np.float64]

# Simulated vision in linear RGB: normal, and without one kind of cones (Machado et al., 2009, severity 1).
VISIONS = np.array(
    [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]
)  # normal, protanopia, deuteranopia, tritanopia

# From linear RGB to OKLab, a color space in which distances are as large as they look (Ottosson, 2020).
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)

FIRST: tuple[Color, ...] = (
    *((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167)),
    *((240, 228, 66), (86, 180, 233), (213, 94, 0)),
)
"""Color Universal Design (Okabe and Ito, 2008), without black."""
WEIGHTS = np.array([0.6, 1, 1, 1])  # of the distance in each vision; with a smaller weight, colors must differ more
STEP = 15  # between the candidates of a channel
MIN_LIGHTNESS = 0.35  # black marks ignored pixels
MIN_CHROMA = 0.06  # grays look like the image below the overlay


def distinct_colors(number: int) -> tuple[Color, ...]:
    """Return different colors, none of them black, which figures use for ignored pixels.

    After FIRST, each color is the one farthest from all before it; its distance is the smallest over normal vision and
    three kinds of color blindness. So the first colors differ most, and they do not depend on the number.
    """
    return _ordered_colors()[:number]


@cache
def _ordered_colors() -> tuple[Color, ...]:
    levels = np.arange(0, 256, STEP)
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    seen = _oklab(candidates)  # (4, N, 3)
    lightness, chroma = seen[0, :, 0], np.hypot(seen[0, :, 1], seen[0, :, 2])
    suitable = (lightness >= MIN_LIGHTNESS) & (chroma >= MIN_CHROMA)
    candidates, seen = candidates[suitable], seen[:, suitable]
    taken = _oklab(np.array([(0, 0, 0), (255, 255, 255), *FIRST]))  # ignored pixels, background, and FIRST
    distances = np.min([_distances(seen, color) for color in taken.swapaxes(0, 1)], 0)
    colors = list(FIRST)
    while len(colors) < MAX_CLASSES:
        farthest = int(distances.argmax())
        red, green, blue = candidates[farthest].tolist()
        colors.append((red, green, blue))
        distances = np.minimum(distances, _distances(seen, seen[:, farthest]))
    return tuple(colors)


def _oklab(colors: NDArray[np.int64]) -> Colors:
    """Return how each vision sees sRGB colors 0 to 255, in OKLab: (N, 3) -> (4, N, 3)."""
    values = colors / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    simulated = np.clip(np.einsum("vij,nj->vni", VISIONS, linear), 0, 1)
    lab: Colors = np.cbrt(simulated @ TO_LMS.T) @ TO_OKLAB.T
    return lab


def _distances(seen: Colors, color: Colors) -> NDArray[np.float64]:
    """Return the smallest weighted distance over all visions: (4, N, 3) and (4, 3) -> (N,)."""
    smallest: NDArray[np.float64] = (WEIGHTS[:, None] * np.linalg.norm(seen - color[:, None], axis=-1)).min(0)
    return smallest
