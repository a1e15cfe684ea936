"""Features of an image as a whole, beside maps of it: never written out for every pixel, forward or back."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class ImageBiasedConvolution(nn.Conv2d):
    """A 1 x 1 convolution of maps joined with image-level features.

    Those are the same at every pixel, so what they add is a bias, one an image. The maps that would be joined are never
    made: they would be twice the size, and in another layout.
    """

    def forward(self, maps: Tensor, image: Tensor) -> Tensor:  # type: ignore[override]
        """(N, C, H, W) and (N, C', 1, 1) -> (N, out, H, W), from weights of C + C' channels."""
        c = maps.shape[1]
        return F.conv2d(maps, self.weight[:, :c], self.bias) + F.conv2d(image, self.weight[:, c:])


def mean_over_image(features: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, C, 1, 1)."""
    if torch.is_grad_enabled() and features.requires_grad:
        mean: Tensor = _Mean.apply(features)  # type: ignore[no-untyped-call]
        return mean
    return features.mean((2, 3), keepdim=True)


class _Mean(torch.autograd.Function):
    """Its gradient is one value for all pixels. Torch would write it out for each, and not channels last."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor) -> Tensor:
        return features.mean((2, 3), keepdim=True)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spread: Tensor = (grad / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape)
        return spread
