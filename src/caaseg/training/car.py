"""Class-aware regularization (CAR; Huang et al., ECCV 2022): losses on features before the classifier.

Three losses, as the authors' code computes them (edwardyehuang/CAR, commit 97c90d4):

- intra: pixels move towards the center of their class,
- center to center (c2c): the centers of different classes become less similar,
- center to pixel (c2p): pixels become less similar to the centers of other classes.

Shapes: N batch, P pixels of an image, K classes, C channels. A class center is the mean of its pixels' features over
the whole batch and all processes. A class without pixels has the center zero and takes part in all losses. An ignored
pixel has a row of zeros in `one_hot`; it counts in all means.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from caaseg.config import LossRecipe
from caaseg.data.sample import IGNORE

MIN_INTRA = 1e-5
MARGIN = 1e-7  # similarities are clipped to [MARGIN, 1 - MARGIN]


class CARLosses(NamedTuple):
    """The three losses of a whole batch, the same on all processes."""

    intra: Tensor
    c2c: Tensor
    c2p: Tensor


def car_loss(features: Tensor, labels: Tensor, num_classes: int, recipe: LossRecipe) -> Tensor:
    """Return this process's share of the weighted losses of the whole batch, to be added to the loss of a step.

    Args:
        features: linear features of this process, (N, C, h, w).
        labels: labels of this process, (N, H, W).
        num_classes: number of classes.
        recipe: weights and thresholds.
    """
    losses = car_losses(
        features,
        labels,
        num_classes,
        c2c_threshold=recipe.car_c2c_threshold,
        c2p_threshold=recipe.car_c2p_threshold,
    )
    total = recipe.car_intra_weight * losses.intra + recipe.car_inter_weight * (losses.c2c + losses.c2p)
    return total / _ranks()


def car_losses(
    features: Tensor, labels: Tensor, num_classes: int, *, c2c_threshold: float = 0.5, c2p_threshold: float = 0.25
) -> CARLosses:
    """Return the losses of the whole batch, over all processes, computed in float32 or float64.

    Each process should add its share to its loss: the losses divided by the number of processes. The gradients are then
    those of the whole batch, too.

    Args:
        features: linear features of this process, (N, C, h, w).
        labels: labels of this process, (N, H, W).
        num_classes: number of classes.
        c2c_threshold: similarity between centers that is not penalized, summed over the other classes.
        c2p_threshold: similarity of pixels to other centers that is not penalized, summed over the other classes.
    """
    with torch.autocast(features.device.type, enabled=False):
        pixels = features.to(torch.promote_types(features.dtype, torch.float32)).flatten(2).transpose(1, 2)  # (N, P, C)
        one_hot = one_hot_labels(resize_labels(labels, features.shape[2:]), num_classes).to(pixels)  # (N, P, K)
        centers = class_centers(pixels, one_hot)  # (1, K, C)
        return CARLosses(
            intra_loss(pixels, centers, one_hot),
            center_loss(centers, c2c_threshold),
            pixel_loss(pixels, centers, one_hot, c2p_threshold),
        )


def resize_labels(labels: Tensor, size: torch.Size) -> Tensor:
    """Resize labels (N, H, W) to the nearest pixel with aligned corners: source row floor(i (H-1) / (h-1) + 1/2)."""
    for dim, length in ((1, size[0]), (2, size[1])):
        steps = max(length - 1, 1)
        positions = torch.arange(length, device=labels.device)
        labels = labels.index_select(dim, (2 * positions * (labels.shape[dim] - 1) + steps) // (2 * steps))
    return labels


def one_hot_labels(labels: Tensor, num_classes: int) -> Tensor:
    """(N, H, W) -> (N, P, K): zeros where the label is ignored."""
    flat = labels.flatten(1).long()
    ignored = flat == IGNORE
    return F.one_hot(flat.masked_fill(ignored, 0), num_classes).masked_fill(ignored.unsqueeze(-1), 0)


def class_centers(pixels: Tensor, one_hot: Tensor) -> Tensor:
    """Return the mean feature of each class over the batches of all processes, (1, K, C); zero without pixels."""
    sums = _sum_over_ranks((one_hot.transpose(1, 2) @ pixels).sum(0, keepdim=True))  # (1, K, C)
    counts = _sum_over_ranks(one_hot.sum((0, 1)))  # (K,)
    return sums / counts.clamp(min=1)[:, None]


def intra_loss(pixels: Tensor, centers: Tensor, one_hot: Tensor, *, remove_max: bool = False) -> Tensor:
    """Return the squared mean distance of pixels from their center, at least 1e-5. Centers get no gradient.

    Args:
        pixels: (N, P, C).
        centers: (1, K, C), or (N, K, C) for centers per image.
        one_hot: (N, P, K).
        remove_max: leave out the largest distance of each image and channel.
    """
    distances = (one_hot @ centers.detach() - pixels).abs() * one_hot.sum(-1, keepdim=True)  # (N, P, C)
    total, count = distances.sum(), distances.numel()
    if remove_max:
        total, count = total - distances.amax(1).sum(), count - distances[:, 0].numel()
    return _mean_over_ranks(total, count).square().clamp(min=MIN_INTRA)


def center_loss(centers: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the squared mean similarity of centers (1 or N, K, C) to other centers, which get no gradient."""
    num_classes, channels = centers.shape[1:]
    similarity = (centers @ centers.detach().transpose(1, 2) / math.sqrt(channels)).softmax(-1)  # (1, K, K)
    own = torch.eye(num_classes, dtype=torch.bool, device=centers.device)
    return _excess(similarity, own, threshold).mean().square()


def pixel_loss(pixels: Tensor, centers: Tensor, one_hot: Tensor, threshold: float = 0.25) -> Tensor:
    """Return the squared mean similarity of pixels to the centers of other classes. Centers get no gradient.

    In the softmax, the similarity of the center to itself replaces the similarity of a pixel to its own class. For an
    ignored pixel, all classes are other classes.
    """
    scale, centers = math.sqrt(pixels.shape[-1]), centers.detach()
    own = one_hot.bool()  # (N, P, K)
    of_centers = centers.square().sum(-1).unsqueeze(1)  # (1, 1, K)
    similarity = torch.where(own, of_centers, pixels @ centers.transpose(1, 2)) / scale  # (N, P, K)
    excess = _excess(similarity.softmax(-1), own, threshold)  # (N, P)
    return _mean_over_ranks(excess.sum(), excess.numel()).square()


def _excess(similarity: Tensor, own: Tensor, threshold: float) -> Tensor:
    """Return the sum of similarities to other classes above threshold / (K - 1), clipped: (..., K) -> (...)."""
    others = max(similarity.shape[-1] - 1, 1)
    above = (similarity.masked_fill(own, 0) - threshold / others).relu()
    return above.sum(-1).clamp(MARGIN, 1 - MARGIN)


def _mean_over_ranks(total: Tensor, count: int) -> Tensor:
    return _sum_over_ranks(total) / _sum_over_ranks(total.new_full((), count))  # no copy: CUDA graphs do not allow it


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum over all processes, with gradients."""
    if _ranks() == 1:
        return tensor
    summed: Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]
    return summed


class _Sum(torch.autograd.Function):
    """Sum over processes. Every process uses the sum, so its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed = grad.clone()
        dist.all_reduce(summed)
        return summed
