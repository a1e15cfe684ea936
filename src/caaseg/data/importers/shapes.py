"""Polygons and masks of label exports, drawn into label maps.

Coordinates are those of COCO: the pixel in column c and row r covers c to c + 1 and r to r + 1. It belongs to a
polygon if its center is inside.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.sample import BadFileError

Overlaps = Literal["area", "order"]
"""Which region is on top where several overlap: the smaller one, or the one that the export lists later."""
Points = Sequence[tuple[float, float]]
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""Errors of readers that find other types or values than the format has."""
MAX_POINTS = 20_000


class Region(NamedTuple):
    """One labeled region of an image."""

    label: str
    """Name of its class."""
    source: str
    """File and annotation, for error messages."""
    mask: Callable[[int, int], NDArray[np.bool_]]
    """Returns the pixels of the region, (H, W), given height and width. Raises ValueError if they are invalid."""


def draw_regions(
    regions: Sequence[Region],
    ids: Mapping[str, int],
    size: tuple[int, int],
    *,
    unlabeled: int,
    overlaps: Overlaps,
) -> NDArray[np.uint8]:
    """Return the label map of an image, (H, W).

    Args:
        regions: in the order of the export.
        ids: class id of each class name.
        size: height and width.
        unlabeled: label of pixels outside all regions.
        overlaps: which region is on top.
    """
    drawn: list[tuple[NDArray[np.bool_], int]] = []
    for region in regions:
        if region.label not in ids:
            raise BadFileError(
                f"{region.source}: the class {region.label!r} is not in the export's list of classes; expected "
                f"{', '.join(ids)}; correct the name, or add the class to the list"
            )
        try:
            drawn.append((region.mask(*size), ids[region.label]))
        except MALFORMED as error:
            raise BadFileError(f"{region.source}: {error}; correct it in the annotation tool") from error
    if overlaps == "area":
        drawn.sort(key=lambda mask_and_id: -int(mask_and_id[0].sum()))
    label = np.full(size, unlabeled, dtype=np.uint8)
    for mask, class_id in drawn:
        label[mask] = class_id
    return label


def polygons_mask(polygons: Sequence[Points], height: int, width: int) -> NDArray[np.bool_]:
    """Return the pixels of one or more polygons, (H, W)."""
    mask = np.zeros((height, width), dtype=np.bool_)
    for polygon in polygons:
        mask |= polygon_mask(polygon, height, width)
    return mask


def polygon_mask(polygon: Points, height: int, width: int) -> NDArray[np.bool_]:
    """Return the pixels whose centers are inside a polygon, (H, W). Raises ValueError if the polygon is invalid."""
    points = np.asarray(polygon, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < 3:
        raise ValueError("a polygon needs at least three points of two coordinates")
    if not np.isfinite(points).all() or len(points) > MAX_POINTS:
        raise ValueError(f"a polygon has coordinates that are not finite, or more than {MAX_POINTS:,} points")
    if crosses_itself(points):
        raise ValueError("a polygon crosses itself, so that its inside is not defined")
    boundary = np.zeros((height, width + 1), dtype=np.bool_)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        # Rows whose center line the edge crosses, and in each the first column whose center is right of it.
        first, end = (int(np.clip(np.ceil(y - 0.5), 0, height)) for y in sorted((y0, y1)))
        rows = np.arange(first, end)
        if len(rows):
            x = x0 + (rows + 0.5 - y0) * (x1 - x0) / (y1 - y0)
            boundary[rows, np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)] ^= True
    inside: NDArray[np.bool_] = np.logical_xor.accumulate(boundary, axis=1)[:, :width]
    return inside


def crosses_itself(points: NDArray[np.float64]) -> bool:
    """Return whether two edges of a closed polygon (P, 2) cross. Edges that only touch do not."""
    start, end = points, np.roll(points, -1, axis=0)
    block = max(1, 1_000_000 // len(points))  # rows of pairs at a time, to bound the memory
    for k in range(0, len(points), block):
        first, last = start[k : k + block, None], end[k : k + block, None]  # (B, 1, 2)
        sides = _side(first, last, start) * _side(first, last, end)  # (B, P), negative if an edge separates the points
        other_sides = _side(start, end, first) * _side(start, end, last)
        if ((sides < 0) & (other_sides < 0)).any():
            return True
    return False


def _side(start: NDArray[np.float64], end: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return on which side of the line from start to end a point is: the sign of a cross product."""
    along, to_point = end - start, point - start
    cross: NDArray[np.float64] = along[..., 0] * to_point[..., 1] - along[..., 1] * to_point[..., 0]
    # Rounding makes tiny values of either sign for points on the line.
    return np.sign(np.where(np.abs(cross) < 1e-9 * (np.abs(along).sum(-1) * np.abs(to_point).sum(-1)), 0.0, cross))
