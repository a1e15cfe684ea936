"""The default colors of classes differ visibly, for people with and without color blindness."""

import numpy as np
import pytest
from numpy.typing import NDArray

from caaseg.data.palette import distinct_colors
from caaseg.data.sample import Color

# The earlier default, the colors of PASCAL VOC: the bits of a class id are spread over the high bits of red, green and
# blue.
OLD = (
    *((128, 0, 0), (0, 128, 0), (128, 128, 0), (0, 0, 128), (128, 0, 128), (0, 128, 128), (128, 128, 128)),
    *((64, 0, 0), (192, 0, 0), (64, 128, 0), (192, 128, 0), (64, 0, 128), (192, 0, 128), (64, 128, 128)),
    *((192, 128, 128), (0, 64, 0), (128, 64, 0), (0, 192, 0), (128, 192, 0), (0, 64, 128)),
)

# Color blindness as matrices in linear RGB. The first two are from Vienot, Brettel and Mollon (1999); the colors were
# chosen with other matrices. The third is from Machado et al. (2009).
BLINDNESS = {
    "protanopia": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    "deuteranopia": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
VISIONS = ("normal", *BLINDNESS)


def lab(colors: tuple[Color, ...], vision: str) -> NDArray[np.float64]:
    """Return CIELAB values under D65, (N, 3)."""
    values = np.array(colors) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    if vision in BLINDNESS:
        linear = (linear @ np.array(BLINDNESS[vision]).T).clip(0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(linear @ to_xyz.T / (0.9505, 1, 1.089), 1e-3)).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def least_distance(colors: tuple[Color, ...], vision: str) -> float:
    seen = lab((*colors, (0, 0, 0)), vision)  # black marks ignored pixels
    distances = np.linalg.norm(seen[:, None] - seen, axis=-1)
    return float(distances[~np.eye(len(seen), dtype=bool)].min())


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(("number", "least"), [(12, 15), (20, 9)])  # side by side, a distance of 2 is just visible
def test_colors_differ_visibly_and_the_old_ones_did_not(number: int, least: float, vision: str) -> None:
    assert least_distance(distinct_colors(number), vision) > least
    assert least_distance(OLD[:number], vision) < least


def test_all_colors_are_different_and_the_first_five_do_not_depend_on_the_total() -> None:
    colors = distinct_colors(254)
    assert len(set(colors)) == 254
    assert colors[:5] == distinct_colors(5)
    assert all(0 <= value <= 255 for color in colors for value in color)
