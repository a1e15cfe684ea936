"""Training losses.

A step may be computed in parts: several accumulation steps, on several devices. Each part computes a sum. The sum is
divided by a count that is known from the labels of the whole step before anything is computed. So the parts add up to
the loss of the whole batch, and a crop without labeled pixels adds zero.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from caaseg.config import LossRecipe
from caaseg.data.sample import IGNORE
from caaseg.kernels import is_supported
from caaseg.models import Prediction
from caaseg.models.resize import resize


class Loss(Protocol):
    """A loss for the training loop: a sum over part of a batch, and the count to divide by.

    Cross entropy sums over pixels and counts pixels. A loss per image, such as Dice, sums over images and counts
    images.
    """

    def count(self, labels: Tensor) -> Tensor:
        """Return what labels (N, H, W) contribute to the divisor, a scalar tensor."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of logits (N, K, h, w), of the labels' size or coarser, and labels (N, H, W)."""


class CrossEntropy:
    """Cross entropy over the labeled pixels.

    Args:
        class_weights: factor per class, (K,).
        ohem: online hard example mining: use only this share of the labeled pixels of each crop, those with the largest
            loss. Chosen per crop, they do not depend on the other crops of the batch.
    """

    def __init__(self, class_weights: Tensor | None = None, *, ohem: float | None = None) -> None:
        self.class_weights = class_weights
        self.ohem = ohem

    def count(self, labels: Tensor) -> Tensor:
        return self._pixels(labels).sum()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.ohem is None and is_supported(logits):
            from caaseg.kernels.cross_entropy import upsampled_cross_entropy

            return upsampled_cross_entropy(logits, labels, self.class_weights, ignore_index=IGNORE)
        if logits.shape[2:] != labels.shape[1:]:
            logits = resize(logits, labels.shape[1:])
        rows = logits.float().movedim(1, -1).flatten(0, -2)  # (N*H*W, K): in this layout the GPU sums deterministically
        targets = labels.flatten().long()
        losses = F.cross_entropy(rows, targets, weight=self.class_weights, ignore_index=IGNORE, reduction="none")
        losses = losses.view(len(labels), -1)  # (N, H*W), 0 where ignored
        if self.ohem is None:
            return losses.sum()
        hardest = losses.sort(dim=1, descending=True, stable=True).values
        ranks = torch.arange(hardest.shape[1], device=hardest.device)
        return hardest.where(ranks < self._pixels(labels)[:, None], 0).sum()

    def _pixels(self, labels: Tensor) -> Tensor:
        """(N,) number of pixels per crop that the loss uses."""
        labeled = (labels != IGNORE).flatten(1).sum(1)
        return labeled if self.ohem is None else (labeled.double() * self.ohem).ceil().long()


def segmentation_loss(loss: Loss, prediction: Prediction, labels: Tensor, count: Tensor, recipe: LossRecipe) -> Tensor:
    """Return what one part adds to the loss of its step: main output, auxiliary branch and further branches.

    Args:
        loss: the loss of each output.
        prediction: of the part, at the labels' size or coarser.
        labels: of the part, (N, H, W).
        count: sum of `loss.count` over all parts of the step.
        recipe: weights of the branches.
    """

    def mean(logits: Tensor) -> Tensor:
        return loss(logits, labels) / count.clamp(min=1)

    total = mean(prediction.logits)
    if prediction.aux is not None:
        total = total + recipe.aux_weight * mean(prediction.aux)
    for logits in prediction.branches.values():
        total = total + recipe.branch_weight * mean(logits)
    return total


def log_class_weights(counts: Tensor) -> Tensor:
    """Return weights (K,) = 1 / log(1.1 + frequency), scaled so that their mean over the counted pixels is 1.

    Args:
        counts: labeled pixels per class, (K,).
    """
    frequency = counts.double() / counts.sum().clamp(min=1)
    weights = 1 / (1.1 + frequency).log()
    return (weights / (weights * frequency).sum()).float()
