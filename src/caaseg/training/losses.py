"""What is made small: cross entropy over the labelled pixels of a whole step.

A step may be computed in parts, one after the other and on several devices. Each part gives a sum; what it is divided
by is known from the labels of the whole step before anything is computed. So parts add up to what one part would give,
and a crop without a labelled pixel adds zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from caaseg.config import LossRecipe
from caaseg.data.sample import IGNORE
from caaseg.kernels import is_supported
from caaseg.models import Prediction
from caaseg.models.resize import resize


def learned_pixels(labels: Tensor, ohem: float | None) -> Tensor:
    """(N,) how many pixels of each crop are learned from: the labelled ones, or the share of them that OHEM keeps."""
    labelled = (labels != IGNORE).flatten(1).sum(1)
    return labelled if ohem is None else (labelled.double() * ohem).ceil().long()


def summed_cross_entropy(
    logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, ohem: float | None = None
) -> Tensor:
    """Cross entropy of the pixels that are learned from, summed.

    Args:
        logits: (N, K, h, w), of the labels' size or coarser; resized to it as a prediction is.
        labels: (N, H, W), class ids or IGNORE.
        weights: (K,) a factor for each class.
        ohem: learn from this share of the labelled pixels of each crop alone, those of the largest loss. Taken crop
            by crop, the choice does not depend on what else is computed beside it.
    """
    if ohem is None and is_supported(logits):
        from caaseg.kernels.cross_entropy import upsampled_cross_entropy

        return upsampled_cross_entropy(logits, labels, weights, ignore_index=IGNORE)
    if logits.shape[2:] != labels.shape[1:]:
        logits = resize(logits, labels.shape[1:])
    rows = logits.float().movedim(1, -1).flatten(0, -2)  # (N*H*W, K): over rows the GPU's sums are deterministic
    losses = F.cross_entropy(rows, labels.flatten().long(), weight=weights, ignore_index=IGNORE, reduction="none")
    losses = losses.view(len(labels), -1)  # (N, H*W), 0 where ignored
    if ohem is None:
        return losses.sum()
    hardest = losses.sort(dim=1, descending=True, stable=True).values
    places = torch.arange(hardest.shape[1], device=hardest.device)
    return hardest.where(places < learned_pixels(labels, ohem)[:, None], 0).sum()


def part_of_loss(
    prediction: Prediction, labels: Tensor, pixels: Tensor, recipe: LossRecipe, weights: Tensor | None
) -> Tensor:
    """What one part adds to the loss of its step.

    Args:
        prediction: of the part, at the labels' size or coarser.
        labels: of the part, (N, H, W).
        pixels: number of pixels that the whole step learns from.
        recipe: weights of the branches, and which pixels count.
        weights: (K,) a factor for each class, or none.
    """

    def mean(logits: Tensor) -> Tensor:
        return summed_cross_entropy(logits, labels, weights=weights, ohem=recipe.ohem) / pixels.clamp(min=1)

    loss = mean(prediction.logits)
    if prediction.aux is not None:
        loss = loss + recipe.aux_weight * mean(prediction.aux)
    for logits in prediction.branches.values():
        loss = loss + recipe.branch_weight * mean(logits)
    return loss


def log_class_weights(counts: Tensor) -> Tensor:
    """(K,) 1 / log(1.1 + frequency), scaled so that the mean over the counted pixels is 1 and the loss keeps its size.

    Args:
        counts: (K,) labelled pixels of each class.
    """
    frequency = counts.double() / counts.sum().clamp(min=1)
    weights = 1 / (1.1 + frequency).log()
    return (weights / (weights * frequency).sum()).float()
