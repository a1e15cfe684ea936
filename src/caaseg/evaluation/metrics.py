"""How well a segmentation fits: counts of pixels that are added up image by image, and the scores read off them."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from caaseg.data.sample import IGNORE

BOUNDARY_SHARE = 0.02
"""How wide a boundary is, as a share of the image's diagonal; the 2% of Cheng et al."""


class ConfusionMatrix:
    """Counts of labelled pixels by true and predicted class.

    A class that neither labels nor predictions have has no IoU, and one without labels no accuracy: they are NaN, and
    means leave them out, as the field does.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)  # [truth, prediction]

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add pixels: predicted class ids and labels of one shape; those labelled IGNORE are left out."""
        num_classes = len(self.counts)
        kept = labels != IGNORE
        cells = labels[kept].to(torch.int64) * num_classes + predictions[kept].to(torch.int64)
        self.counts += torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)

    def merge(self, other: "ConfusionMatrix") -> None:
        """Add what another matrix has counted."""
        self.counts += other.counts.to(self.counts.device)

    def reduce(self) -> None:
        """Add up what all processes have counted, where there are several: then each has the whole."""
        _sum_over_processes(self.counts)

    @property
    def iou(self) -> Tensor:
        """(K,) intersection over union of each class, NaN where it is in neither labels nor predictions."""
        right = self.counts.diagonal().double()
        return right / (self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal())

    @property
    def accuracy(self) -> Tensor:
        """(K,) share of each class's pixels that were found, NaN where it has none."""
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


class BoundaryCounts:
    """Boundary IoU (Cheng et al., CVPR 2021): the IoU of what of each class lies close to its contour.

    A pixel is close to the contour of its class if another class, or the outside of the image, is at most d rows and d
    columns away, which is d erosions by 3 x 3 as in the authors' code. Where the label is IGNORE nobody knows of a
    contour: there the truth is taken to go on as the prediction does, and nothing is counted.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu", share: float = BOUNDARY_SHARE) -> None:
        """Start at zero.

        Args:
            num_classes: number of classes.
            device: where the counts are.
            share: d as a share of the image's diagonal; it is at least a pixel.
        """
        self.share = share
        self.counts = torch.zeros(3, num_classes, dtype=torch.int64, device=device)  # of truth, of prediction, of both

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add whole images: predicted class ids and labels, (N, H, W)."""
        distance = max(1, round(self.share * math.hypot(*labels.shape[-2:])))
        labelled = labels != IGNORE
        predictions = predictions.to(torch.int64)
        truth = torch.where(labelled, labels.to(torch.int64), predictions)
        of_truth = labelled & close_to_contour(truth, distance)
        of_prediction = labelled & close_to_contour(predictions, distance)
        of_both = of_truth & of_prediction & (truth == predictions)
        for counts, pixels in zip(
            self.counts, (truth[of_truth], predictions[of_prediction], truth[of_both]), strict=True
        ):
            counts += torch.bincount(pixels, minlength=len(counts))

    def merge(self, other: "BoundaryCounts") -> None:
        """Add what another has counted."""
        self.counts += other.counts.to(self.counts.device)

    def reduce(self) -> None:
        """Add up what all processes have counted, where there are several: then each has the whole."""
        _sum_over_processes(self.counts)

    @property
    def iou(self) -> Tensor:
        """(K,) boundary IoU of each class, NaN where it is in neither labels nor predictions."""
        of_truth, of_prediction, of_both = self.counts.unbind()
        return of_both.double() / (of_truth + of_prediction - of_both)

    @property
    def mean_iou(self) -> float:
        return float(self.iou.nanmean())


def close_to_contour(classes: Tensor, distance: int) -> Tensor:
    """Whether another class or the outside is at most `distance` rows and columns away, (N, H, W) -> (N, H, W).

    All classes at once, at a cost that depends on neither their number nor the distance: pixels that touch another
    class are marked first, then the marks are spread.
    """
    framed = F.pad(classes.float(), (1, 1, 1, 1), value=-1)[:, None]  # (N, 1, H + 2, W + 2): the outside is a class
    touching = F.max_pool2d(framed, 3, stride=1) != -F.max_pool2d(-framed, 3, stride=1)
    return _spread(_spread(touching[:, 0], distance - 1, dim=1), distance - 1, dim=2)


def _spread(marks: Tensor, reach: int, dim: int) -> Tensor:
    """Mark whatever is at most `reach` from a mark along one axis."""
    length = marks.shape[dim]
    counted = marks.cumsum(dim)
    before = torch.cat([torch.zeros_like(counted.narrow(dim, 0, 1)), counted], dim)  # marks before each place
    at = torch.arange(length, device=marks.device)
    first, behind = (at - reach).clamp(min=0), (at + reach + 1).clamp(max=length)
    return before.index_select(dim, behind) > before.index_select(dim, first)


def _sum_over_processes(counts: Tensor) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts)
