"""Cross entropy of coarse logits against fine labels, without ever making fine logits.

A feature stands for 8 x 8 or 16 x 16 pixels. Upsampled in float32, the logits of a batch of 16 crops of 513 x 513 in 59
classes take a gigabyte, their softmax and their gradients as much again each. The kernel here interpolates the logits
of a pixel where it needs them, and sums the gradients of a line of pixels at once into those of the coarse features
beside it. What is left to sum, over lines, is a product with the matrix of the interpolation.

No two programs add to one place: losses and gradients are the same from run to run.
"""

from typing import Any

import torch
from torch import Tensor

from caaseg.kernels import HAS_TRITON

IGNORE = 255  # the label of pixels that no loss looks at, as in caaseg.data.sample

FEATURES = 16  # of a coarse line, in one program, which has the pixels between them


def applies(logits: Tensor) -> bool:
    """Whether the kernel is to take these logits."""
    return HAS_TRITON and logits.is_cuda and logits.dtype in (torch.float16, torch.bfloat16, torch.float32)


def upsampled_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """The summed cross entropy of logits (N, K, h, w), resized with corners aligned, and labels (N, H, W).

    Args:
        logits: of coarse features.
        labels: class ids or IGNORE.
        weights: (K,) float32, a factor for each class, or none.
    """
    loss: Tensor = _UpsampledCrossEntropy.apply(logits, labels, weights)  # type: ignore[no-untyped-call]
    return loss


class _UpsampledCrossEntropy(torch.autograd.Function):
    """The gradient comes with the loss: it is as small as the coarse logits, and nothing else needs to be kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        from caaseg.kernels.cross_entropy_kernel import cross_entropy_kernel

        n, classes, h, w = logits.shape
        height, width = labels.shape[1:]
        pixels = logits.detach().permute(0, 2, 3, 1).contiguous()  # (N, h, w, K)
        blocks = max(1, -(-(w - 1) // (FEATURES - 1)))
        losses = torch.empty(n, height, blocks, device=logits.device)
        lines = torch.empty(n, height, blocks, FEATURES, classes, device=logits.device)
        cross_entropy_kernel[(n * height, blocks)](
            pixels, labels.contiguous(), weights, losses, lines, height, width, h, w, classes,
            _step(h, height), _step(w, width),
            ignore=IGNORE, weighted=weights is not None, exact=logits.dtype == torch.float32,
            block_w=FEATURES, **tile(classes),
        )  # fmt: skip
        # (h, H) @ (N, H, blocks * FEATURES * K)
        parts = (interpolation(h, height, logits.device).T @ lines.flatten(2)).view(n, h, *lines.shape[2:])
        ctx.save_for_backward(_joined(parts)[:, :, :w].permute(0, 3, 1, 2))
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        from caaseg.kernels.launching import refuse_second_derivatives

        refuse_second_derivatives("resize the logits and use torch's cross_entropy")
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss).to(ctx.dtype), None, None


def tile(classes: int) -> dict[str, int]:
    """How many pixels a program has at a time, and by how many warps: mostly 16 to 32 logits a thread."""
    block_k = max(16, 1 << (classes - 1).bit_length())
    return {"block_x": max(16, min(64, 4096 // block_k)), "block_k": block_k, "num_warps": 2 if block_k == 16 else 4}


def _joined(parts: Tensor) -> Tensor:
    """(N, h, blocks, FEATURES, K) -> (N, h, features, K): the last feature of a block is the first of the next."""
    n, h, blocks, features, classes = parts.shape
    joined = parts.new_zeros(n, h, blocks * (features - 1) + 1, classes)
    joined[:, :, :-1] = parts[:, :, :, :-1].flatten(2, 3)
    joined[:, :, features - 1 :: features - 1] += parts[:, :, :, -1]
    return joined


def _step(coarse: int, fine: int) -> float:
    """How far the next pixel lies on the coarse line."""
    return (coarse - 1) / (fine - 1) if fine > 1 else 0.0


def interpolation(coarse: int, fine: int, device: torch.device) -> Tensor:
    """(fine, coarse) how much of each feature is in each pixel, corners aligned."""
    at = torch.arange(fine, device=device, dtype=torch.float32) * _step(coarse, fine)
    below = at.floor().clamp(max=coarse - 1).long()
    part = (at - below).unsqueeze(1)
    matrix = torch.zeros(fine, coarse, device=device)
    matrix.scatter_(1, below.unsqueeze(1), 1 - part)
    return matrix.scatter_add_(1, (below + 1).clamp(max=coarse - 1).unsqueeze(1), part)
