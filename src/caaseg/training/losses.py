"""Training losses: cross entropy, focal, Dice, Lovasz-softmax, weighted sums of them, and the presence of classes.

A step may be computed in parts: several accumulation steps, on several devices. Each part computes a sum. The sum is
divided by a count that is known from the labels of the whole step before anything is computed. So the parts add up to
the loss of the whole batch, and a crop without labeled pixels adds zero.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from caaseg.config import LossRecipe
from caaseg.data.sample import IGNORE
from caaseg.kernels import is_supported
from caaseg.models import Prediction
from caaseg.models.resize import resize
from caaseg.training.car import car_loss


class Loss(Protocol):
    """A loss for the training loop: a sum over part of a batch, and the count to divide by.

    Cross entropy sums over pixels and counts pixels. A loss per image, such as Dice, sums over images and counts
    images. A sum of several losses has several sums and counts.
    """

    def count(self, labels: Tensor) -> Tensor:
        """Return the contribution of labels (N, H, W) to the divisor, a scalar, or (T,) for T losses."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of logits (N, K, h, w) and labels (N, H, W), a scalar, or (T,) for T losses.

        The logits have the size of the labels or are coarser.
        """


class CrossEntropy:
    """Cross entropy over the labeled pixels.

    Args:
        class_weights: factor per class, (K,).
        ohem: online hard example mining: use only this fraction of the labeled pixels of each crop, the pixels with the
            largest loss. The choice does not depend on the other crops of the batch.
        label_smoothing: share of the target that is spread over all classes, as in torch's cross_entropy.
        average: divide by the number of pixels that the loss uses ("labeled"), or by the number of all pixels ("all").
    """

    def __init__(
        self,
        class_weights: Tensor | None = None,
        *,
        ohem: float | None = None,
        label_smoothing: float = 0.0,
        average: Literal["labeled", "all"] = "labeled",
    ) -> None:
        self.class_weights = class_weights
        self.ohem = ohem
        self.label_smoothing = label_smoothing
        self.average = average

    def count(self, labels: Tensor) -> Tensor:
        if self.average == "all":
            return torch.tensor(labels.numel(), device=labels.device)
        return self._used(labels).sum()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.ohem is None and is_supported(logits):
            from caaseg.kernels.cross_entropy import upsampled_cross_entropy

            return upsampled_cross_entropy(
                logits, labels, self.class_weights, ignore_index=IGNORE, label_smoothing=self.label_smoothing
            )
        rows, targets = _pixels(logits, labels)
        losses = F.cross_entropy(
            rows,
            targets,
            weight=self.class_weights,
            ignore_index=IGNORE,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        losses = losses.view(len(labels), -1)  # (N, H*W), 0 where ignored
        if self.ohem is None:
            return losses.sum()
        hardest = losses.sort(dim=1, descending=True, stable=True).values
        ranks = torch.arange(hardest.shape[1], device=hardest.device)
        return hardest.where(ranks < self._used(labels)[:, None], 0).sum()

    def _used(self, labels: Tensor) -> Tensor:
        """Return the number of pixels per crop that the loss uses, (N,)."""
        labeled = (labels != IGNORE).flatten(1).sum(1)
        return labeled if self.ohem is None else (labeled.double() * self.ohem).ceil().long()


class Focal:
    """Focal loss over the labeled pixels: (1 - p)^gamma * -log p for the probability p of the label.

    Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.

    Args:
        gamma: 0 is cross entropy; larger values give well classified pixels less weight.
        class_weights: factor per class, (K,).
    """

    def __init__(self, gamma: float = 2.0, class_weights: Tensor | None = None) -> None:
        self.gamma = gamma
        self.class_weights = class_weights

    def count(self, labels: Tensor) -> Tensor:
        return (labels != IGNORE).sum()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows, targets = _pixels(logits, labels)
        losses = F.cross_entropy(rows, targets, ignore_index=IGNORE, reduction="none")  # -log p, 0 where ignored
        # expm1 keeps the gradient of well classified pixels finite for exponents below 1.
        losses = (-torch.expm1(-losses)).clamp(min=1e-12) ** self.gamma * losses
        if self.class_weights is not None:
            losses = losses * self.class_weights[targets.clamp(max=len(self.class_weights) - 1)]
        return losses.sum()


class Dice:
    """1 - Dice coefficient per image, averaged over the classes that its labels contain.

    Milletari et al., V-Net, 3DV 2016, but the denominator sums probabilities and labels, not their squares.
    """

    def count(self, labels: Tensor) -> Tensor:
        return _has_labels(labels).sum()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        probabilities, targets = _probabilities(logits, labels)  # (N, K, P)
        overlap, total = (probabilities * targets).sum(2), (probabilities + targets).sum(2)  # (N, K)
        present = targets.any(2)
        losses = (1 - 2 * overlap / total.clamp(min=1e-6)) * present
        return (losses.sum(1) / present.sum(1).clamp(min=1)).sum()


class Lovasz:
    """Lovasz-softmax loss per image, averaged over the classes that its labels contain.

    Berman et al., The Lovasz-Softmax loss, CVPR 2018: a convex surrogate of 1 - IoU.
    """

    def count(self, labels: Tensor) -> Tensor:
        return _has_labels(labels).sum()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        probabilities, targets = _probabilities(logits, labels)  # (N, K, P)
        # Ignored pixels have error 0 and target 0: they are sorted last and change nothing.
        errors, order = (targets - probabilities).abs().sort(dim=2, descending=True, stable=True)
        hits = targets.gather(2, order).cumsum(2)
        positives = hits[:, :, -1:]  # (N, K, 1)
        positions = torch.arange(1, errors.shape[2] + 1, device=errors.device)
        jaccard = 1 - (positives - hits) / (positives + positions - hits)  # of the errors up to each position
        steps = torch.cat([jaccard[:, :, :1], jaccard[:, :, 1:] - jaccard[:, :, :-1]], dim=2)
        present = targets.any(2)
        losses = (errors * steps).sum(2) * present
        return (losses.sum(1) / present.sum(1).clamp(min=1)).sum()


class WeightedSum:
    """Sum of several losses, each averaged by its own count.

    Args:
        losses: each loss with its weight.
    """

    def __init__(self, losses: Sequence[tuple[Loss, float]]) -> None:
        self.losses = tuple(losses)

    def count(self, labels: Tensor) -> Tensor:
        return torch.stack([loss.count(labels) for loss, _ in self.losses])

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([weight * loss(logits, labels) for loss, weight in self.losses])


def make_loss(recipe: LossRecipe, class_weights: Tensor | None) -> Loss:
    """Return the loss of a recipe: one loss, or the weighted sum of several."""
    cross_entropy = CrossEntropy(
        class_weights, ohem=recipe.ohem, label_smoothing=recipe.label_smoothing, average=recipe.average
    )
    candidates: list[tuple[Loss, float]] = [
        (cross_entropy, recipe.cross_entropy),
        (Focal(recipe.focal_gamma, class_weights), recipe.focal),
        (Dice(), recipe.dice),
        (Lovasz(), recipe.lovasz),
    ]
    losses = [(loss, weight) for loss, weight in candidates if weight]
    return losses[0][0] if [weight for _, weight in losses] == [1.0] else WeightedSum(losses)


def _pixels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of all pixels in float32, (N*H*W, K), and their labels, (N*H*W,)."""
    if logits.shape[2:] != labels.shape[1:]:
        logits = resize(logits, labels.shape[1:])
    # In this layout the GPU sums deterministically.
    return logits.float().movedim(1, -1).flatten(0, -2), labels.flatten().long()


def _probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and one-hot targets of the pixels of each image, (N, K, H*W); both are 0 where ignored."""
    if logits.shape[2:] != labels.shape[1:]:
        logits = resize(logits, labels.shape[1:])
    labeled = (labels != IGNORE).flatten(1).unsqueeze(1)  # (N, 1, P)
    classes = torch.arange(logits.shape[1], device=labels.device).view(1, -1, 1)
    targets = (labels.flatten(1).unsqueeze(1) == classes) & labeled
    probabilities = logits.float().softmax(1).flatten(2)
    return probabilities * labeled, targets.float()


def _has_labels(labels: Tensor) -> Tensor:
    """Return whether each image has a labeled pixel, (N,)."""
    return (labels != IGNORE).flatten(1).any(1)


def presence_loss(presence: Tensor, labels: Tensor) -> Tensor:
    """Return the summed binary cross entropy of the classes that the labels of each image contain.

    Zhang et al., Context Encoding for Semantic Segmentation, CVPR 2018. An image without labels contains no class.

    Args:
        presence: logits per image and class, (N, K).
        labels: (N, H, W).
    """
    contained = labels.new_zeros(len(labels), IGNORE + 1).scatter_(1, labels.flatten(1).long(), 1)
    logits = presence.to(torch.promote_types(presence.dtype, torch.float32))
    return F.binary_cross_entropy_with_logits(logits, contained[:, : logits.shape[1]].to(logits), reduction="sum")


def segmentation_loss(
    loss: Loss,
    prediction: Prediction,
    labels: Tensor,
    count: Tensor,
    recipe: LossRecipe,
    num_images: int | None = None,
) -> Tensor:
    """Return the loss of one part of a step: all outputs of the model, and losses on its features.

    Args:
        loss: the loss of each output.
        prediction: prediction for the part, at the size of the labels or coarser.
        labels: labels of the part, (N, H, W).
        count: sum of `loss.count` over all parts of the step.
        recipe: weights of the branches and of class-aware regularization, which needs the whole batch in one part per
            process.
        num_images: number of images in all parts of the step; None if this is the only part.
    """

    def mean(logits: Tensor) -> Tensor:
        return (loss(logits, labels) / count.clamp(min=1)).sum()

    total = mean(prediction.logits)
    if prediction.aux is not None:
        total = total + recipe.aux_weight * mean(prediction.aux)
    for logits in prediction.branches.values():
        total = total + recipe.branch_weight * mean(logits)
    if prediction.presence is not None:
        num_targets = (num_images or len(labels)) * prediction.presence.shape[1]
        total = total + recipe.presence_weight * presence_loss(prediction.presence, labels) / num_targets
    if prediction.regularized is not None:
        total = total + car_loss(prediction.regularized, labels, prediction.logits.shape[1], recipe)
    return total


def log_class_weights(counts: Tensor) -> Tensor:
    """Return weights (K,) = 1 / log(1.1 + frequency), scaled so that their mean over the counted pixels is 1.

    Args:
        counts: labeled pixels per class, (K,).
    """
    frequency = counts.double() / counts.sum().clamp(min=1)
    weights = 1 / (1.1 + frequency).log()
    return (weights / (weights * frequency).sum()).float()
