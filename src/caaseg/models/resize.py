"""Bilinear resizing as the authors do it."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import interpolate


def resize(features: Tensor, size: Sequence[int]) -> Tensor:
    """(N, C, h, w) -> (N, C, H, W), corners aligned.

    A feature of stride s sees the pixels around s * i, so that the corners of an odd-sized image (513 at stride 8) are
    the corners of its feature map (65).
    """
    return interpolate(features, tuple(size), mode="bilinear", align_corners=True)


def upsample_input(images: Tensor, factor: float) -> Tensor:
    """(N, C, H, W) with steps between pixels `factor` times as long: corners stay corners, on a network's grid."""
    return images if factor == 1 else resize(images, [upsampled_side(side, factor) for side in images.shape[2:]])


def upsampled_side(side: int, factor: float) -> int:
    """How long a side becomes. In whole numbers alone, so that an exported network can tell it for any side."""
    return (side - 1) * round(1000 * factor) // 1000 + 1
