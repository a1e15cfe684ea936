"""Tiling: predict a large image in overlapping windows and blend their scores, in bounded memory.

The edges of all windows divide the image into cells. A cell is finished as soon as every window that covers it has been
predicted; it is then yielded and its memory freed. Only a band of cells across the shorter side of the image is in
memory at any time. The band is as high as the overlap of the windows.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Size = tuple[int, int]
"""Height and width."""

OVERLAP = 1 / 3


class Part(NamedTuple):
    """A finished rectangle of an image."""

    rows: slice
    columns: slice
    scores: Tensor  # (K, h, w)


class Span(NamedTuple):
    """A window along one axis."""

    pixels: slice
    weights: Tensor  # (length,), float64; at every pixel the weights of all windows sum to one
    cells: range = range(0)  # indices of the cells it covers


def blend_windows(
    predict: Callable[[Tensor], Tensor],
    image: Tensor,
    window: Size,
    *,
    overlap: float = OVERLAP,
    shifted: bool = False,
    batch_size: int = 1,
) -> Iterator[Part]:
    """Predict an image in windows and yield the blended scores part by part; the parts cover each pixel once.

    Args:
        predict: scores of images, (N, 3, h, w) -> (N, K, h, w).
        image: (3, H, W).
        window: height and width of the windows; a smaller image is one window.
        overlap: minimum share of a window that the next window overlaps.
        shifted: shift the grid of windows by half a step.
        batch_size: windows per call of `predict`.
    """
    height, width = image.shape[1:]
    rows, row_cells = _spans_and_cells(height, window[0], overlap, shifted)
    columns, column_cells = _spans_and_cells(width, window[1], overlap, shifted)
    sums: dict[tuple[int, int], Tensor] = {}  # unfinished cells, (K, h, w)
    missing = _coverage(rows, len(row_cells))[:, None] * _coverage(columns, len(column_cells))  # windows per cell
    # Along the shorter side first, which keeps the band of unfinished cells short.
    grid = [(r, c) for r in rows for c in columns] if width <= height else [(r, c) for c in columns for r in rows]
    for first in range(0, len(grid), batch_size):
        windows = grid[first : first + batch_size]
        batch = torch.stack([image[:, r.pixels, c.pixels] for r, c in windows])
        for (r, c), scores in zip(windows, predict(batch), strict=True):
            weighted = scores * (r.weights[:, None] * c.weights).to(scores)
            for i in r.cells:
                for j in c.cells:
                    part = weighted[:, _relative(row_cells[i], r.pixels), _relative(column_cells[j], c.pixels)]
                    sums[i, j] = sums[i, j].add_(part) if (i, j) in sums else part.clone()
                    missing[i, j] -= 1
                    if missing[i, j] == 0:
                        yield Part(row_cells[i], column_cells[j], sums.pop((i, j)))


def labels_from_parts(parts: Iterable[Part], size: Size) -> Tensor:
    """Return the class with the largest score per pixel, (H, W) uint8 on the CPU."""
    labels = torch.empty(size, dtype=torch.uint8)
    for rows, columns, scores in parts:
        labels[rows, columns] = scores.max(0).indices.to(torch.uint8).cpu()  # four times as fast as argmax on a CPU
    return labels


def is_tiled(size: Size, window: Size) -> bool:
    """Return whether an image needs more than one window."""
    return size[0] > window[0] or size[1] > window[1]


def window_spans(length: int, window: int, overlap: float, *, shifted: bool = False) -> list[Span]:
    """Place windows evenly along one axis. Weights fall linearly from the center of a window to its borders.

    Args:
        length: pixels along the axis.
        window: length of a window; at most `length` is used.
        overlap: minimum share of a window that the next window overlaps.
        shifted: shift all windows except the outermost by half a step, which needs one more window.
    """
    window = min(window, length)
    step = max(1, int(window * (1 - overlap)))
    number = -(-(length - window) // step) + 1
    starts = [round(k * (length - window) / max(1, number - 1)) for k in range(number)]
    if shifted:
        starts = sorted({0, *((start + after) // 2 for start, after in pairwise(starts)), length - window})
    index = torch.arange(window, dtype=torch.float64)
    hat = torch.minimum(index, window - 1 - index) + 1
    total = torch.zeros(length, dtype=torch.float64)
    for start in starts:
        total[start : start + window] += hat
    return [Span(slice(start, start + window), hat / total[start : start + window]) for start in starts]


def _spans_and_cells(length: int, window: int, overlap: float, shifted: bool) -> tuple[list[Span], list[slice]]:
    """Return the windows along one axis, and the cells between their edges."""
    spans = window_spans(length, window, overlap, shifted=shifted)
    edges = sorted({edge for span in spans for edge in (span.pixels.start, span.pixels.stop)})
    cells = [slice(first, last) for first, last in pairwise(edges)]
    covered = (range(edges.index(span.pixels.start), edges.index(span.pixels.stop)) for span in spans)
    return [span._replace(cells=cells_of) for span, cells_of in zip(spans, covered, strict=True)], cells


def _coverage(spans: list[Span], cells: int) -> Tensor:
    """Return the number of windows per cell of an axis."""
    return torch.tensor([sum(cell in span.cells for span in spans) for cell in range(cells)])


def _relative(cell: slice, window: slice) -> slice:
    return slice(cell.start - window.start, cell.stop - window.start)
