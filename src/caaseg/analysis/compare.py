"""Where models differ: the images they differ most on, and in each the places.

Shapes: M models, H x W pixels, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from caaseg.analysis.ranking import Ranking
from caaseg.data.loader import EvaluationLoader
from caaseg.data.sample import IGNORE, SegmentationDataset
from caaseg.drawing.panels import Box
from caaseg.evaluation.evaluate import check_classes
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models.predictor import Predictor

GRID = 32  # cells on the longer side of an image, of which boxes are made
SMALLEST = 2  # cells on a side of a box
COST = 0.2  # of a pixel in a box, in shares of the densest cell; below a quarter, so that two by two cells pay with one
MINOR = 0.2  # a box that gains less than this share of the first one's is left out


def differing(predictions: Tensor, label: Tensor) -> Tensor:
    """Labelled pixels of which models (M, H, W) do not all say the same, (H, W)."""
    return (predictions != predictions[:1]).any(0) & (label != IGNORE)


def boxes(marked: Tensor, number: int = 3) -> list[Box]:
    """The places of most marks (H, W): up to `number` rectangles that do not overlap, the richest first.

    The image is cut into cells. Of all rectangles of cells, from two cells to half of the image a side, that one is
    taken which gains most, where a mark gains 1 and every pixel costs a part of it: it grows over what is densely
    marked and no further. The next one is sought beside it.
    """
    height, width = marked.shape
    if number < 1 or not marked.any():
        return []
    side = -(-max(height, width) // GRID)
    rows, columns = -(-height // side), -(-width // side)
    marks, pixels = torch.zeros(2, rows * side, columns * side, dtype=torch.float64)
    marks[:height, :width], pixels[:height, :width] = marked, 1  # what lies outside the image neither gains nor costs
    marks, pixels = (each.view(rows, side, columns, side).sum((1, 3)) for each in (marks, pixels))  # (rows, columns)
    gains = marks - COST * float(marks.max()) / side**2 * pixels
    top, bottom = _spans(rows)
    left, right = _spans(columns)
    found: list[Box] = []
    first = 0.0
    while len(found) < number:
        before = torch.zeros(rows + 1, columns + 1, dtype=torch.float64)
        before[1:, 1:] = gains.cumsum(0).cumsum(1)
        lines = before[bottom] - before[top]  # (row spans, columns + 1)
        of_all = lines[:, right] - lines[:, left]  # (row spans, column spans)
        best = int(of_all.argmax())
        gain = float(of_all.flatten()[best])
        first = first or gain
        if gain < MINOR * first:
            break
        r, c = divmod(best, of_all.shape[1])
        t, b, x, y = int(top[r]), int(bottom[r]), int(left[c]), int(right[c])
        gains[t:b, x:y] = -float(height * width)  # whoever overlaps it loses more than there is to gain
        found.append(Box(t * side, x * side, min(height, b * side), min(width, y * side)))
    return found


def _spans(cells: int) -> tuple[Tensor, Tensor]:
    """Where spans along an axis begin and end (behind their last cell), from the smallest to half of it."""
    begin, end = torch.combinations(torch.arange(cells + 1)).unbind(1)
    smallest = min(SMALLEST, cells)
    fits = (end - begin >= smallest) & (end - begin <= max(smallest, cells // 2))
    return begin[fits], end[fits]


class ImageDifference(NamedTuple):
    """An image's numbers of pixels."""

    name: str
    labelled: int
    differing: int
    right: tuple[int, ...]  # of the differing ones, those that each model has right

    @property
    def share(self) -> float:
        return self.differing / self.labelled

    @property
    def order(self) -> tuple[float, str]:
        """Images that the models differ most on come first."""
        return -self.share, self.name


class Compared(NamedTuple):
    """An image with what each model made of it."""

    counts: ImageDifference
    image: Tensor  # (3, H, W) uint8
    label: Tensor  # (H, W) uint8
    predictions: Tensor  # (M, H, W) uint8
    boxes: list[Box]  # where they differ most


@dataclass(frozen=True, kw_only=True, eq=False)
class Differences:
    """What a comparison on a split found."""

    matrices: tuple[ConfusionMatrix, ...]
    """Of each model."""
    images: tuple[ImageDifference, ...]
    """All that have a labelled pixel, by the share of them that the models differ on, the largest first."""
    shown: tuple[Compared, ...]
    """The first of each stretch of the split, in the same order."""


def study_differences(
    models: Sequence[nn.Module],
    dataset: SegmentationDataset,
    *,
    number: int = 4,
    workers: int = 0,
    seen: Callable[[int], None] | None = None,
) -> Differences:
    """Compare what models say of every image of a dataset, whole and at its own scale.

    Images come and go one by one. The split is cut into equal stretches, of which the image each is kept that the
    models differ most on: neighbours, as of one film, are much alike. Of the others some numbers are kept.

    Args:
        models: two or more, of the dataset's classes.
        dataset: what to look at.
        number: how many images to keep.
        workers: processes that read beside this one; 0 reads in this one.
        seen: told how many images are done.
    """
    predictors = [Predictor(model) for model in models]
    matrices = tuple(ConfusionMatrix(len(dataset.classes)) for _ in models)
    pin = predictors[0].device.type == "cuda"
    ranking: Ranking[ImageDifference, Compared] = Ranking(len(dataset), number)
    for index, batch in enumerate(EvaluationLoader(dataset, workers=workers, pin_memory=pin)):
        label = batch.labels[0]
        scores = (predictor.scores(batch.images)[0] for predictor in predictors)
        predictions = torch.stack([_classes(of_one, dataset) for of_one in scores])  # (M, H, W)
        for matrix, prediction in zip(matrices, predictions, strict=True):
            matrix.update(prediction, label)
        labelled = int((label != IGNORE).sum())
        if labelled > 0:
            differ = differing(predictions, label)
            right = tuple(int((differ & (prediction == label)).sum()) for prediction in predictions)
            one = ImageDifference(batch.names[0], labelled, int(differ.sum()), right)
            ranking.add(index, one, partial(_compared, one, batch.images[0], label, predictions, differ))
        if seen is not None:
            seen(index + 1)
    return Differences(matrices=matrices, images=ranking.images, shown=ranking.shown)


def _compared(counts: ImageDifference, image: Tensor, label: Tensor, predictions: Tensor, differ: Tensor) -> Compared:
    return Compared(counts, image, label, predictions, boxes(differ))


def _classes(scores: Tensor, dataset: SegmentationDataset) -> Tensor:
    """(K, H, W) -> (H, W) uint8."""
    check_classes(len(scores), dataset)
    return scores.argmax(0).to("cpu", torch.uint8)
