"""Cross entropy of coarse logits against fine labels, without upsampling the logits in memory.

A feature covers 8 x 8 or 16 x 16 pixels. Upsampled in float32, the logits of a batch of 16 crops of 513 x 513 in 59
classes take a gigabyte, and so do their softmax and their gradients. The kernel interpolates the logits of each pixel
on the fly and adds the gradients of a line of pixels to the gradients of the neighboring coarse features. The remaining
sum over lines is a product with the interpolation matrix.

No two programs write to the same address, so losses and gradients are deterministic.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from caaseg.kernels.common import ceil_div, jit, next_power_of_2, on_device, raise_if_double_backward

FEATURES = 16  # coarse features of a line per program, which computes the pixels between them


def upsampled_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None, *, ignore_index: int, label_smoothing: float = 0.0
) -> Tensor:
    """Return the summed cross entropy of logits upsampled to the size of the labels (bilinear, aligned corners).

    Args:
        logits: coarse, (N, K, h, w).
        labels: class ids or `ignore_index`, (N, H, W).
        weights: factor per class, (K,) float32, or None.
        ignore_index: label of pixels without loss, not negative.
        label_smoothing: share of the target that is spread over all classes, as in torch's cross_entropy.

    Returns:
        The sum of the losses of all pixels, a scalar in float32.
    """
    loss: Tensor = _UpsampledCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, weights, ignore_index, label_smoothing
    )
    return loss


class _UpsampledCrossEntropy(torch.autograd.Function):
    """Compute the gradient together with the loss, and save only the gradient, which is as large as the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        n, classes, h, w = logits.shape
        height, width = labels.shape[1:]
        coarse = logits.detach().permute(0, 2, 3, 1).contiguous()  # (N, h, w, K)
        blocks = max(1, ceil_div(w - 1, FEATURES - 1))
        losses = torch.empty(n, height, blocks, device=logits.device)
        grads = torch.empty(n, height, blocks, FEATURES, classes, device=logits.device)
        with on_device(logits):
            cross_entropy_kernel[(n * height, blocks)](
                coarse, labels.contiguous(), weights, losses, grads, height, width, h, w, classes,
                _step(h, height), _step(w, width), label_smoothing,
                ignore_index=ignore_index, weighted=weights is not None, smoothed=label_smoothing > 0,
                exact=logits.dtype == torch.float32,
                block_w=FEATURES, **block_sizes(classes),
            )  # fmt: skip
        # (h, H) @ (N, H, blocks * FEATURES * K)
        parts = (interpolation_matrix(h, height, logits.device).T @ grads.flatten(2)).view(n, h, *grads.shape[2:])
        ctx.save_for_backward(_join_blocks(parts)[:, :, :w].permute(0, 3, 1, 2))
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        raise_if_double_backward("resize the logits and use torch's cross_entropy")
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss).to(ctx.dtype), None, None, None, None


def block_sizes(classes: int) -> dict[str, int]:
    """Return pixels per tile, classes per tile and warps, for 16 to 32 logits per thread in most cases."""
    block_k = max(16, next_power_of_2(classes))
    return {"block_x": max(16, min(64, 4096 // block_k)), "block_k": block_k, "num_warps": 2 if block_k == 16 else 4}


def _join_blocks(parts: Tensor) -> Tensor:
    """Merge blocks of features that overlap by one: (N, h, blocks, FEATURES, K) -> (N, h, features, K)."""
    n, h, blocks, features, classes = parts.shape
    joined = parts.new_zeros(n, h, blocks * (features - 1) + 1, classes)
    joined[:, :, :-1] = parts[:, :, :, :-1].flatten(2, 3)
    joined[:, :, features - 1 :: features - 1] += parts[:, :, :, -1]
    return joined


def _step(coarse: int, fine: int) -> float:
    """Return the distance between neighboring pixels in units of coarse features."""
    return (coarse - 1) / (fine - 1) if fine > 1 else 0.0


def interpolation_matrix(coarse: int, fine: int, device: torch.device) -> Tensor:
    """Return the matrix (fine, coarse) of linear interpolation with aligned corners."""
    x = torch.arange(fine, device=device, dtype=torch.float32) * _step(coarse, fine)
    left = x.floor().clamp(max=coarse - 1).long()
    fraction = (x - left).unsqueeze(1)
    matrix = torch.zeros(fine, coarse, device=device)
    matrix.scatter_(1, left.unsqueeze(1), 1 - fraction)
    return matrix.scatter_add_(1, (left + 1).clamp(max=coarse - 1).unsqueeze(1), fraction)


@jit
def _load_features(
    coarse: tl.tensor, start: tl.tensor, offs_x: tl.tensor, w: tl.tensor, classes: tl.tensor, block_k: tl.constexpr
) -> tl.tensor:
    """Load some features of a coarse line, (features, classes)."""
    offs_k = tl.arange(0, block_k)
    in_bounds = (offs_x < w)[:, None] & (offs_k < classes)[None, :]
    return tl.load(coarse + start + offs_x[:, None] * classes + offs_k[None, :], in_bounds, other=0.0).to(tl.float32)


@jit
def _first_pixel(feature: tl.tensor, step_x: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Return the first pixel of a line on or to the right of a feature."""
    return tl.minimum(tl.ceil(feature / tl.maximum(step_x, 1e-30)), width).to(tl.int32)


@jit
def cross_entropy_kernel(
    coarse: tl.tensor,  # (N, h, w, K) coarse logits
    labels: tl.tensor,  # (N, H, W)
    weights: tl.tensor,  # (K,) if weighted
    losses: tl.tensor,  # (N, H, blocks) float32: sum per program
    grads: tl.tensor,  # (N, H, blocks, block_w, K) float32: gradients of each program's features
    height: tl.tensor,
    width: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    classes: tl.tensor,
    step_y: tl.tensor,
    step_x: tl.tensor,
    label_smoothing: tl.tensor,
    ignore_index: tl.constexpr,
    weighted: tl.constexpr,
    smoothed: tl.constexpr,
    exact: tl.constexpr,
    block_w: tl.constexpr,
    block_x: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute the loss of the pixels of a line between some features, and its gradient for these features.

    Interpolation and its gradient are products with a matrix of interpolation weights (pixels, features): the logits of
    a pixel then stay in few threads, and each feature is read once. The last feature of a program is the first of the
    next.
    """
    line, block = tl.program_id(0), tl.program_id(1)
    image, y = line // height, line % height
    first = block * (block_w - 1)
    offs_k = tl.arange(0, block_k)
    features = first + tl.arange(0, block_w)

    # Interpolate between the coarse lines above and below.
    y_coarse = y * step_y
    above = tl.minimum(tl.floor(y_coarse).to(tl.int32), h - 1)
    below = tl.minimum(above + 1, h - 1)
    fraction = y_coarse - above
    upper = _load_features(coarse, (image.to(tl.int64) * h + above) * w * classes, features, w, classes, block_k)
    lower = _load_features(coarse, (image.to(tl.int64) * h + below) * w * classes, features, w, classes, block_k)
    line_logits = upper * (1 - fraction) + lower * fraction

    start_x, end_x = _first_pixel(first, step_x, width), _first_pixel(first + block_w - 1, step_x, width)
    if block == tl.num_programs(1) - 1:
        end_x = width
    if smoothed:
        class_weights = tl.where(offs_k < classes, 1.0, 0.0)
        if weighted:
            class_weights = tl.load(weights + offs_k, offs_k < classes, other=0.0)
    grad = tl.zeros([block_w, block_k], tl.float32)
    total = tl.zeros([block_x], tl.float32)
    for block_start in range(start_x, end_x, block_x):
        offs_x = block_start + tl.arange(0, block_x)
        x_coarse = offs_x * step_x
        shares = tl.maximum(1 - tl.abs(x_coarse[:, None] - features[None, :]), 0.0)
        logits = tl.dot(shares, line_logits, input_precision="ieee" if exact else "tf32x3")
        logits = tl.where((offs_k < classes)[None, :], logits, float("-inf"))

        label = tl.load(labels + line.to(tl.int64) * width + offs_x, offs_x < end_x, other=ignore_index).to(tl.int32)
        pixel_weight = tl.where(label != ignore_index, 1.0, 0.0)
        if weighted:
            pixel_weight *= tl.load(weights + label, label < classes, other=0.0)
        max_logit = tl.max(logits, 1)
        exps = tl.exp(logits - max_logit[:, None])
        exp_sum = tl.sum(exps, 1)
        # With many classes, ignore_index is also the index of a column.
        is_label = (label[:, None] == offs_k[None, :]) & (label != ignore_index)[:, None]
        # Weight of each class in the loss of a pixel, and their sum.
        target = tl.where(is_label, pixel_weight[:, None], 0.0)
        if smoothed:
            spread = tl.where(label != ignore_index, label_smoothing / classes, 0.0)
            target = target * (1 - label_smoothing) + spread[:, None] * class_weights[None, :]
            pixel_weight = pixel_weight * (1 - label_smoothing) + spread * tl.sum(class_weights, 0)
            target_logit = tl.sum(target * tl.where((offs_k < classes)[None, :], logits, 0.0), 1)
            total += (max_logit + tl.log(exp_sum)) * pixel_weight - target_logit
        else:
            label_logit = tl.sum(tl.where(is_label, logits, 0.0), 1)
            total += (max_logit + tl.log(exp_sum) - label_logit) * pixel_weight

        grad_logits = exps * (pixel_weight / exp_sum)[:, None] - target
        shares_t = tl.maximum(1 - tl.abs(x_coarse[None, :] - features[:, None]), 0.0)
        grad += tl.dot(shares_t, grad_logits, input_precision="ieee" if exact else "tf32")
    part = line.to(tl.int64) * tl.num_programs(1) + block
    address = grads + (part * block_w + tl.arange(0, block_w)[:, None]) * classes + offs_k[None, :]
    tl.store(address, grad, (offs_k < classes)[None, :])
    tl.store(losses + part, tl.sum(total, 0))
