"""The images a model does best and worst on, kept while an evaluation passes by: a few, however many there are."""

import math
from typing import NamedTuple

from torch import Tensor, uint8

from caaseg.data.sample import Batch
from caaseg.evaluation.metrics import ConfusionMatrix


class Scored(NamedTuple):
    """An image with what was made of it."""

    name: str
    mean_iou: float  # over the classes that its own labels or predictions have
    image: Tensor  # (3, H, W) uint8
    label: Tensor  # (H, W) uint8
    prediction: Tensor  # (H, W) uint8


class BestWorstImages:
    """Best and worst of all images seen. An image without a labelled pixel has no score and is passed over."""

    def __init__(self, num_classes: int, number: int = 3) -> None:
        """Nothing is kept yet.

        Args:
            num_classes: number of classes.
            number: how many of the best, and of the worst, to keep.
        """
        self.num_classes = num_classes
        self.number = number
        self.images = 0
        """How many were seen that have a score."""
        self._falling: list[Scored] = []
        self._rising: list[Scored] = []

    def see(self, batch: Batch, predictions: Tensor) -> None:
        """Take a batch with its predicted class ids, (N, H, W), as `evaluate` hands them out."""
        for image, label, name, prediction in zip(batch.images, batch.labels, batch.names, predictions, strict=True):
            found = prediction.to("cpu", uint8)
            matrix = ConfusionMatrix(self.num_classes)
            matrix.update(found, label)
            score = matrix.mean_iou
            if math.isnan(score):
                continue
            self.images += 1
            scored = Scored(name, score, image, label, found)
            self._falling = sorted([*self._falling, scored], key=lambda one: (-one.mean_iou, one.name))[: self.number]
            self._rising = sorted([*self._rising, scored], key=lambda one: (one.mean_iou, one.name))[: self.number]

    @property
    def best(self) -> list[Scored]:
        """The best first. Of few images the better half, so that none is best and worst."""
        return self._falling[: (self.images + 1) // 2]

    @property
    def worst(self) -> list[Scored]:
        """The worst first."""
        return self._rising[: self.images // 2]
