"""A very large picture in overlapping windows, in little memory: what is finished is handed out, and forgotten.

The edges of all windows cut the picture into cells. A cell is finished when every window that covers it was seen; only
the cells between have their scores kept: a band across the shorter side of the picture, as high as windows overlap.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from caaseg.models.predictor import Predictor, Size, along

OVERLAP = 1 / 3


class Part(NamedTuple):
    """A rectangle of a picture with its scores."""

    rows: slice
    columns: slice
    scores: Tensor  # (K, h, w)


class Stretch(NamedTuple):
    """Where windows lie along one axis, and the cells that one of them covers."""

    place: slice
    weights: Tensor  # (length of the window,)
    cells: range


def blended_parts(
    predictor: Predictor, image: Tensor, window: Size, *, overlap: float = OVERLAP, shifted: bool = False
) -> Iterator[Part]:
    """The scores of a picture, part by part as they are finished; the parts cover it, each pixel once.

    Every window is predicted as a picture of its own, with all that the predictor does to one, and counts by weights
    that sum to one at every pixel. At one scale the result is that of a Predictor with the same window.

    Args:
        predictor: one that takes its views whole.
        image: uint8, (3, H, W).
        window: height and width, in pixels of the picture; a smaller picture is one window.
        overlap: share of a window that the next one covers again, at least.
        shifted: lay the grid of windows half a step further.
    """
    height, width = image.shape[1:]
    rows, row_cells = _stretches(height, window[0], overlap, shifted)
    columns, column_cells = _stretches(width, window[1], overlap, shifted)
    waiting: dict[tuple[int, int], Tensor] = {}  # sums of cells, (K, h, w)
    seen = torch.zeros(len(row_cells), len(column_cells), dtype=torch.int64)
    needed = _covered(rows, len(row_cells))[:, None] * _covered(columns, len(column_cells))
    # Windows next to each other come one after the other across the shorter side: what waits is the shorter band.
    across = [(r, c) for r in rows for c in columns] if width <= height else [(r, c) for c in columns for r in rows]
    at_once = max(1, predictor.batch_size // (1 + predictor.flip))
    for first in range(0, len(across), at_once):
        windows = across[first : first + at_once]
        pieces = torch.stack([image[:, r.place, c.place] for r, c in windows])
        for (r, c), scores in zip(windows, predictor.scores(pieces), strict=True):
            weighted = scores * (r.weights[:, None] * c.weights).to(scores.device)
            for i in r.cells:
                for j in c.cells:
                    down, right = row_cells[i], column_cells[j]
                    part = weighted[:, _within(down, r.place), _within(right, c.place)]
                    waiting[i, j] = waiting[i, j].add_(part) if (i, j) in waiting else part.clone()
                    seen[i, j] += 1
                    if seen[i, j] == needed[i, j]:
                        yield Part(down, right, waiting.pop((i, j)))


def labels_of(parts: Iterator[Part], size: Size) -> Tensor:
    """The class of each pixel, (H, W) uint8, on the CPU."""
    labels = torch.empty(size, dtype=torch.uint8)
    for rows, columns, scores in parts:
        labels[rows, columns] = scores.argmax(0).to(torch.uint8).cpu()
    return labels


def is_cut(size: Size, window: Size) -> bool:
    """Whether a picture is more than one window."""
    return size[0] > window[0] or size[1] > window[1]


def grid_disagreement(
    predictor: Predictor, image: Tensor, labels: Tensor, window: Size, *, overlap: float = OVERLAP
) -> float:
    """The share of pixels that get another class when the grid of windows lies half a step further.

    What a window cannot see decides it: 0 for a network that looks at one pixel, more the further it looks.

    Args:
        predictor: what predicted the labels.
        image: uint8, (3, H, W).
        labels: what it said, (H, W).
        window: of the windows it was predicted in.
        overlap: of these windows.
    """
    size = (image.shape[1], image.shape[2])
    again = labels_of(blended_parts(predictor, image, window, overlap=overlap, shifted=True), size)
    return float((again != labels).sum()) / labels.numel()


def _stretches(length: int, window: int, overlap: float, shifted: bool) -> tuple[list[Stretch], list[slice]]:
    """The windows along one axis, and the cells that their edges make."""
    windows = [(slice(start, start + len(w)), w) for start, w in along(length, window, overlap, shifted=shifted)]
    edges = sorted({edge for place, _ in windows for edge in (place.start, place.stop)})
    cells = [slice(first, last) for first, last in pairwise(edges)]
    return [Stretch(p, w, range(edges.index(p.start), edges.index(p.stop))) for p, w in windows], cells


def _covered(stretches: list[Stretch], cells: int) -> Tensor:
    """How many windows cover each cell of an axis."""
    return torch.tensor([sum(cell in stretch.cells for stretch in stretches) for cell in range(cells)])


def _within(cell: slice, window: slice) -> slice:
    return slice(cell.start - window.start, cell.stop - window.start)
