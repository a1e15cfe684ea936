"""How well a segmentation fits: everything is read off one confusion matrix."""

import torch
from torch import Tensor

from caaseg.data.sample import IGNORE


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
