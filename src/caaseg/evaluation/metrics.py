"""Segmentation metrics: pixel counts that add up over images and processes, and the scores computed from them."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from caaseg.data.sample import IGNORE

BOUNDARY_WIDTH = 0.02
"""Width of a boundary as a share of the image diagonal, 2% as in Cheng et al."""


class Metric(Protocol):
    """A metric for `evaluate` and `train`: it is created per evaluation, updated per batch and computed at the end."""

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add images: predicted class ids and labels, (N, H, W). Pixels labeled IGNORE do not count."""

    def reduce(self) -> None:
        """Sum over all processes, if torch.distributed is initialized."""

    def compute(self) -> dict[str, float]:
        """Return named scores."""


MetricFactory = Callable[[int, torch.device], Metric]
"""Creates a metric from the number of classes and the device, as the classes below do."""


class ConfusionMatrix:
    """Counts of labeled pixels by true and predicted class.

    A class in neither labels nor predictions has no IoU, and a class without labels has no accuracy: these are NaN, and
    means skip them.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)  # [truth, prediction]

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add pixels: predicted class ids and labels of the same shape. Pixels labeled IGNORE are skipped."""
        num_classes = len(self.counts)
        labeled = labels != IGNORE
        cells = labels[labeled].to(torch.int64) * num_classes + predictions[labeled].to(torch.int64)
        self.counts += torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)

    def reduce(self) -> None:
        """Sum the counts over all processes."""
        _all_reduce(self.counts)

    def compute(self) -> dict[str, float]:
        return {
            "mean_iou": self.mean_iou,
            "pixel_accuracy": self.pixel_accuracy,
            "mean_accuracy": self.mean_accuracy,
        }

    @property
    def iou(self) -> Tensor:
        """(K,) intersection over union per class, NaN for classes in neither labels nor predictions."""
        correct = self.counts.diagonal().double()
        return correct / (self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal())

    @property
    def accuracy(self) -> Tensor:
        """(K,) share of each class's pixels that are predicted correctly, NaN for classes without labels."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    @property
    def mean_iou(self) -> float:
        return float(self.iou.nanmean())

    @property
    def mean_accuracy(self) -> float:
        return float(self.accuracy.nanmean())

    @property
    def pixel_accuracy(self) -> float:
        return float(self.counts.diagonal().sum().double() / self.counts.sum())


class BoundaryIoU:
    """Boundary IoU (Cheng et al., CVPR 2021): the IoU of the pixels of each class that are close to its contour.

    A pixel is close to the contour of its class if another class or the image border is at most d rows and d columns
    away, which equals d erosions by 3 x 3 as in the authors' code. Where the label is IGNORE the contour is unknown:
    the label is assumed to equal the prediction there, and the pixel is not counted.

    Args:
        num_classes: number of classes.
        device: device of the counts.
        width: d as a share of the image diagonal; d is at least one pixel.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu", width: float = BOUNDARY_WIDTH) -> None:
        self.width = width
        self.counts = torch.zeros(3, num_classes, dtype=torch.int64, device=device)  # truth, prediction, intersection

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add whole images: predicted class ids and labels, (N, H, W)."""
        distance = max(1, round(self.width * math.hypot(*labels.shape[-2:])))
        labeled = labels != IGNORE
        predictions = predictions.to(torch.int64)
        truth = torch.where(labeled, labels.to(torch.int64), predictions)
        in_truth = labeled & close_to_contour(truth, distance)
        in_prediction = labeled & close_to_contour(predictions, distance)
        in_both = in_truth & in_prediction & (truth == predictions)
        selected = (truth[in_truth], predictions[in_prediction], truth[in_both])
        for counts, pixels in zip(self.counts, selected, strict=True):
            counts += torch.bincount(pixels, minlength=len(counts))

    def reduce(self) -> None:
        """Sum the counts over all processes."""
        _all_reduce(self.counts)

    def compute(self) -> dict[str, float]:
        return {"mean_boundary_iou": self.mean_iou}

    @property
    def iou(self) -> Tensor:
        """(K,) boundary IoU per class, NaN for classes in neither labels nor predictions."""
        in_truth, in_prediction, in_both = self.counts.unbind()
        return in_both.double() / (in_truth + in_prediction - in_both)

    @property
    def mean_iou(self) -> float:
        return float(self.iou.nanmean())


def close_to_contour(classes: Tensor, distance: int) -> Tensor:
    """Return whether another class or the border is at most `distance` rows and columns away, (N, H, W) -> (N, H, W).

    All classes at once: pixels that touch another class are found first, then dilated. The cost depends on neither the
    number of classes nor the distance.
    """
    # (N, 1, H + 2, W + 2), with a class of its own around the image
    padded = F.pad(classes.float(), (1, 1, 1, 1), value=-1)[:, None]
    touching = F.max_pool2d(padded, 3, stride=1) != -F.max_pool2d(-padded, 3, stride=1)
    return _dilate(_dilate(touching[:, 0], distance - 1, dim=1), distance - 1, dim=2)


def _dilate(mask: Tensor, distance: int, dim: int) -> Tensor:
    """Set all elements that are at most `distance` from a set element along one dimension."""
    length = mask.shape[dim]
    totals = mask.cumsum(dim)
    before = torch.cat([torch.zeros_like(totals.narrow(dim, 0, 1)), totals], dim)  # set elements before each position
    positions = torch.arange(length, device=mask.device)
    first, end = (positions - distance).clamp(min=0), (positions + distance + 1).clamp(max=length)
    return before.index_select(dim, end) > before.index_select(dim, first)


def _all_reduce(counts: Tensor) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts)
