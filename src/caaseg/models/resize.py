"""Bilinear resizing: with aligned corners, as in the authors' code, or without, as in mmsegmentation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from caaseg.kernels import replace_torch


def resize(features: Tensor, size: Sequence[int], *, align_corners: bool = True) -> Tensor:
    """Resize bilinearly: (N, C, h, w) -> (N, C, H, W).

    With aligned corners, feature i of stride s is centered at pixel s * i. So the corner pixels of an image of 513
    pixels coincide with the corners of its feature map, which has 65 features at stride 8.
    """
    needs_grad = torch.is_grad_enabled() and features.requires_grad
    if replace_torch(features) and not needs_grad and min(size) > 0:
        from caaseg.kernels.resize import resize_channels_last

        dtype = torch.float32 if torch.is_autocast_enabled("cuda") else features.dtype  # like `interpolate`
        # Reading the features by a function of torch lets batch norm folding see it.
        return resize_channels_last(features.detach(), size, align_corners, dtype)
    return interpolate(features, tuple(size), mode="bilinear", align_corners=align_corners)


def upsample_input(images: Tensor, factor: float) -> Tensor:
    """Upsample images (N, C, H, W) with aligned corners: the distance between two pixels is multiplied by a factor."""
    return images if factor == 1 else resize(images, [upsampled_side(side, factor) for side in images.shape[2:]])


def upsampled_side(side: int, factor: float) -> int:
    """Return the upsampled length of a side. It uses only integer arithmetic, which exported models can compute."""
    return (side - 1) * round(1000 * factor) // 1000 + 1


def cells(side: int, stride: int) -> int:
    """Return the length of a side of a feature map: side / stride, rounded up.

    The formula avoids negative numbers, because exported models round divisions toward zero.
    """
    return (side + stride - 1) // stride
