"""Comparison of models: the images on which their predictions differ most (or images chosen by name), and where.

Shapes: M models, H x W pixels, K classes.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from caaseg.analysis.ranking import Ranking
from caaseg.data.datasets.pairs import PairDataset
from caaseg.data.loader import EvaluationLoader
from caaseg.data.sample import IGNORE, SegmentationDataset
from caaseg.drawing.panels import Box
from caaseg.errors import CaasegError
from caaseg.evaluation.evaluate import check_classes
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models.predictor import Predictor

GRID = 32  # grid cells along the longer side of an image; boxes consist of cells
MIN_SIDE = 2  # cells
PIXEL_COST = 0.2  # times the density of the densest cell; below 1/4, so that 2 x 2 cells around it have a gain
MIN_GAIN = 0.2  # relative to the gain of the first box; boxes with a smaller gain are dropped


def differing_pixels(predictions: Tensor, label: Tensor) -> Tensor:
    """Return the mask (H, W) of labeled pixels where predictions (M, H, W) are not all equal."""
    return (predictions != predictions[:1]).any(0) & (label != IGNORE)


def find_boxes(mask: Tensor, max_boxes: int = 3, *, grid: int = GRID) -> list[Box]:
    """Return up to `max_boxes` non-overlapping boxes around the densest regions of a mask (H, W), best first.

    The image is divided into square cells. Among all rectangles of cells, from two cells to half the image per side,
    the one with the largest gain is chosen: each pixel of the mask adds 1, and every pixel costs a fraction of the
    density of the densest cell. So a box covers a dense region only. The search repeats on the remaining cells.

    Args:
        mask: the pixels to find, (H, W).
        max_boxes: maximum number of boxes.
        grid: number of cells along the longer side of the image.
    """
    height, width = mask.shape
    if max_boxes < 1 or not mask.any():
        return []
    side = -(-max(height, width) // grid)
    rows, columns = -(-height // side), -(-width // side)
    marked, inside = torch.zeros(2, rows * side, columns * side, dtype=torch.float64)
    marked[:height, :width], inside[:height, :width] = mask, 1  # padding neither gains nor costs
    marked, inside = (each.view(rows, side, columns, side).sum((1, 3)) for each in (marked, inside))  # (rows, columns)
    gains = marked - PIXEL_COST * float(marked.max()) / side**2 * inside
    top, bottom = _spans(rows)
    left, right = _spans(columns)
    boxes: list[Box] = []
    first_gain = 0.0
    while len(boxes) < max_boxes:
        integral = torch.zeros(rows + 1, columns + 1, dtype=torch.float64)
        integral[1:, 1:] = gains.cumsum(0).cumsum(1)
        strips = integral[bottom] - integral[top]  # (row spans, columns + 1)
        box_gains = strips[:, right] - strips[:, left]  # (row spans, column spans)
        best = int(box_gains.argmax())
        gain = float(box_gains.flatten()[best])
        first_gain = first_gain or gain
        if gain < MIN_GAIN * first_gain:
            break
        r, c = divmod(best, box_gains.shape[1])
        t, b, x, y = int(top[r]), int(bottom[r]), int(left[c]), int(right[c])
        gains[t:b, x:y] = -float(height * width)  # an overlapping box loses more than it can gain
        boxes.append(Box(t * side, x * side, min(height, b * side), min(width, y * side)))
    return boxes


def _spans(cells: int) -> tuple[Tensor, Tensor]:
    """Return starts and exclusive ends of all spans of MIN_SIDE to cells / 2 cells along an axis."""
    start, end = torch.combinations(torch.arange(cells + 1)).unbind(1)
    shortest = min(MIN_SIDE, cells)
    fits = (end - start >= shortest) & (end - start <= max(shortest, cells // 2))
    return start[fits], end[fits]


class DifferenceCounts(NamedTuple):
    """Pixel counts of one image."""

    name: str
    labeled: int
    differing: int
    right: tuple[int, ...]  # per model, the number of differing pixels that it predicts correctly

    @property
    def share(self) -> float:
        return self.differing / self.labeled

    @property
    def rank_key(self) -> tuple[float, str]:
        """Images with the largest share of differing pixels rank first."""
        return -self.share, self.name


class ComparedImage(NamedTuple):
    """An image with the predictions of all models."""

    counts: DifferenceCounts
    image: Tensor  # (3, H, W) uint8
    label: Tensor  # (H, W) uint8
    predictions: Tensor  # (M, H, W) uint8

    @property
    def boxes(self) -> list[Box]:
        """The regions where the predictions differ most."""
        return find_boxes(differing_pixels(self.predictions, self.label))


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Result of `compare_models`."""

    matrices: tuple[ConfusionMatrix, ...]
    """One per model."""
    images: tuple[DifferenceCounts, ...]
    """All images with a labeled pixel, by share of differing pixels, largest first."""
    shown: tuple[ComparedImage, ...]
    """The images chosen by name, in that order, or the first-ranked image of each section of the split, ranked."""


def compare_models(
    models: Sequence[nn.Module],
    dataset: SegmentationDataset,
    *,
    images: int | Sequence[str] = 4,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare the predictions of models on every image of a dataset, at its native size.

    If `images` contains names, these images are returned. If it is a number, the split is divided into that many equal
    sections, and the image with the largest share of differing pixels is returned from each section. For all other
    images, only pixel counts are returned.

    Args:
        models: two or more models for the classes of the dataset.
        dataset: the dataset.
        images: names of the images to return, in this order, or the number of images.
        workers: worker processes that load images; 0 loads in this process.
        progress: called with the number of processed images.
    """
    names = () if isinstance(images, int) else tuple(dict.fromkeys(images))
    check_names(names, dataset)
    predictors = [Predictor(model) for model in models]
    matrices = tuple(ConfusionMatrix(len(dataset.classes)) for _ in models)
    ranking: Ranking[DifferenceCounts, ComparedImage] = Ranking(len(dataset), images if isinstance(images, int) else 1)
    named: dict[str, ComparedImage] = {}
    pin = predictors[0].device.type == "cuda"
    for index, batch in enumerate(EvaluationLoader(dataset, workers=workers, pin_memory=pin)):
        image, label = batch.images[0], batch.labels[0]
        predictions = torch.stack([_predict(predictor, image, dataset) for predictor in predictors])  # (M, H, W)
        for matrix, prediction in zip(matrices, predictions, strict=True):
            matrix.update(prediction, label)
        labeled = int((label != IGNORE).sum())
        if labeled > 0:
            differ = differing_pixels(predictions, label)
            right = tuple(int((differ & (prediction == label)).sum()) for prediction in predictions)
            counts = DifferenceCounts(batch.names[0], labeled, int(differ.sum()), right)
            compared = ComparedImage(counts, image, label, predictions)
            ranking.add(index, counts, compared)
            if counts.name in names:
                named[counts.name] = compared
        elif batch.names[0] in names:
            raise CaasegError(f"image {batch.names[0]} has no labeled pixel to compare; leave it out of --images")
        if progress is not None:
            progress(index + 1)
    shown = tuple(named[name] for name in names) or ranking.shown
    return Comparison(matrices=matrices, images=ranking.images, shown=shown)


def check_names(images: Sequence[str], dataset: SegmentationDataset) -> None:
    """Raise CaasegError with the most similar names if a dataset has no image with one of these names."""
    known = _names(dataset) if images else []
    unknown = [name for name in images if name not in known]
    if unknown:
        nearest = [difflib.get_close_matches(name, known, n=3, cutoff=0) for name in unknown]
        raise CaasegError(
            f"--images has {', '.join(map(repr, unknown))}; expected a number, or names of images of the split; the "
            f"nearest are {', '.join(dict.fromkeys(name for names in nearest for name in names))}"
        )


def _names(dataset: SegmentationDataset) -> list[str]:
    parts: list[SegmentationDataset] = getattr(dataset, "datasets", [])  # set if splits are concatenated
    if parts:
        return [name for part in parts for name in _names(part)]
    if isinstance(dataset, PairDataset):
        return [pair.name for pair in dataset.pairs]  # without reading the files
    return [dataset[index].name for index in range(len(dataset))]


def _predict(predictor: Predictor, image: Tensor, dataset: SegmentationDataset) -> Tensor:
    """Predict an image (3, H, W): class ids (H, W), uint8, on the CPU."""
    logits = predictor.scores(image[None])[0]
    check_classes(len(logits), dataset)
    return logits.argmax(0).to("cpu", torch.uint8)
