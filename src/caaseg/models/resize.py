"""Bilinear resizing, with aligned corners like the authors' code, or without them like mmsegmentation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from caaseg.kernels import is_supported


def resize(features: Tensor, size: Sequence[int], *, align_corners: bool = True) -> Tensor:
    """Resize bilinearly: (N, C, h, w) -> (N, C, H, W).

    With aligned corners, feature i of stride s is centered at pixel s * i, so the corners of an odd-sized image (513
    pixels at stride 8) coincide with the corners of its feature map (65).
    """
    if _has_kernel(features):
        from caaseg.kernels.resize import resize_channels_last

        dtype = torch.float32 if torch.is_autocast_enabled("cuda") else features.dtype  # like `interpolate`
        return resize_channels_last(features, size, align_corners, dtype)
    return interpolate(features, tuple(size), mode="bilinear", align_corners=align_corners)


def _has_kernel(features: Tensor) -> bool:
    """Return whether a kernel applies: in inference, to a map that is channels last, where torch's is slow."""
    return (
        is_supported(features)
        and not (torch.is_grad_enabled() and features.requires_grad)
        and features.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
    )


def upsample_input(images: Tensor, factor: float) -> Tensor:
    """Upsample images (N, C, H, W) with aligned corners: the distance between two pixels is multiplied by a factor."""
    return images if factor == 1 else resize(images, [upsampled_side(side, factor) for side in images.shape[2:]])


def upsampled_side(side: int, factor: float) -> int:
    """Return the upsampled length of a side. Integer arithmetic only, so that exported models can compute it."""
    return (side - 1) * round(1000 * factor) // 1000 + 1


def cells(side: int, stride: int) -> int:
    """Return the length of a side of a feature map: side / stride, rounded up.

    The formula avoids negative numbers, because exported models round divisions toward zero.
    """
    return (side + stride - 1) // stride
