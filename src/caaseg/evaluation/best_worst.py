"""The best and worst images of an evaluation, collected while it runs."""

import math
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, uint8

from caaseg.data.sample import Batch
from caaseg.evaluation.metrics import ConfusionMatrix


class ScoredImage(NamedTuple):
    """An image with its label, prediction and score."""

    name: str
    mean_iou: float  # over the classes in its own label or prediction
    image: Tensor  # (3, H, W) uint8
    label: Tensor  # (H, W) uint8
    prediction: Tensor  # (H, W) uint8


class BestWorstImages:
    """Collect the images with the highest and the lowest mean IoU. Images without a labeled pixel are skipped.

    Args:
        num_classes: number of classes.
        number: maximum number of best images, and of worst images.
    """

    def __init__(self, num_classes: int, number: int = 3) -> None:
        self.num_classes = num_classes
        self.number = number
        self.images = 0  # number of images with a score
        self._highest: list[ScoredImage] = []
        self._lowest: list[ScoredImage] = []

    def update(self, batch: Batch, predictions: Tensor) -> None:
        """Add a batch with its predicted class ids, (N, H, W). Pass it to `evaluate` as `on_batch`."""
        for image, label, name, prediction in zip(batch.images, batch.labels, batch.names, predictions, strict=True):
            labels = prediction.to("cpu", uint8)
            matrix = ConfusionMatrix(self.num_classes)
            matrix.update(labels, label)
            if not math.isnan(matrix.mean_iou):
                self.images += 1
                self._add([ScoredImage(name, matrix.mean_iou, image, label, labels)])

    def gather(self) -> None:
        """Merge the images of all processes; every process then has the same best and worst images."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, (self.images, self._highest, self._lowest))
        self.images, self._highest, self._lowest = 0, [], []
        for images, highest, lowest in others:
            self.images += images
            self._add([*highest, *lowest])

    def _add(self, images: list[ScoredImage]) -> None:
        highest = {scored.name: scored for scored in (*self._highest, *images)}.values()
        lowest = {scored.name: scored for scored in (*self._lowest, *images)}.values()
        self._highest = sorted(highest, key=lambda scored: (-scored.mean_iou, scored.name))[: self.number]
        self._lowest = sorted(lowest, key=lambda scored: (scored.mean_iou, scored.name))[: self.number]

    @property
    def best(self) -> list[ScoredImage]:
        """The best images, best first. With few images, only the better half: no image is both best and worst."""
        return self._highest[: (self.images + 1) // 2]

    @property
    def worst(self) -> list[ScoredImage]:
        """The worst images, worst first. With few images, only the worse half."""
        return self._lowest[: self.images // 2]
