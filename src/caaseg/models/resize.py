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
