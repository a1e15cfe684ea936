"""Bilinear resizing of maps that are channels last in memory, without gradient: a Triton kernel and its launch."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from caaseg.kernels.common import ceil_div, jit, on_device

BLOCK = 2048  # elements per program, of one image row of the result


def resize_channels_last(features: Tensor, size: Sequence[int], align_corners: bool, dtype: torch.dtype) -> Tensor:
    """Resize features (N, C, h, w), channels last in memory, to (N, C, H, W) like torch's bilinear `interpolate`.

    Args:
        features: the map to resize.
        size: height and width of the result.
        align_corners: True to align the centers of the corner pixels, False to align the corners of the images.
        dtype: dtype of the result, which is channels last, too.
    """
    n, c, h, w = features.shape
    height, width = size
    shape, layout = (n, c, height, width), torch.channels_last
    out = torch.empty(shape, dtype=dtype, device=features.device, memory_format=layout)
    steps = [
        ((old - 1) / (new - 1) if new > 1 else 0.0) if align_corners else old / new
        for old, new in ((h, height), (w, width))
    ]
    with on_device(features):
        resize_kernel[(n * height, ceil_div(width * c, BLOCK))](
            features, out, h, w, height, width, *steps, channels=c, align_corners=align_corners, block=BLOCK
        )
    return out


@jit
def resize_kernel(
    features: tl.tensor,  # (N * h * w, C)
    out: tl.tensor,  # (N * height * width, C)
    h: tl.tensor,
    w: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    step_y: tl.tensor,  # distance between neighboring pixels of the result, in pixels of the features
    step_x: tl.tensor,
    channels: tl.constexpr,  # constant, because every offset is divided by it
    align_corners: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Interpolate a part of an image row of the result. Elements of a row are consecutive in memory."""
    row = tl.program_id(0).to(tl.int64)
    image, y = row // height, (row % height).to(tl.int32)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    in_bounds = offs < width * channels
    x, c = offs // channels, offs % channels
    top, bottom, from_top = source(y, step_y, h, align_corners)
    left, right, from_left = source(x, step_x, w, align_corners)
    top_row, bottom_row = features + (image * h + top) * w * channels, features + (image * h + bottom) * w * channels
    left, right = left * channels + c, right * channels + c
    top_left = tl.load(top_row + left, in_bounds, other=0.0).to(tl.float32)
    top_right = tl.load(top_row + right, in_bounds, other=0.0).to(tl.float32)
    bottom_left = tl.load(bottom_row + left, in_bounds, other=0.0).to(tl.float32)
    bottom_right = tl.load(bottom_row + right, in_bounds, other=0.0).to(tl.float32)
    upper = (1 - from_left) * top_left + from_left * top_right
    lower = (1 - from_left) * bottom_left + from_left * bottom_right
    result = (1 - from_top) * upper + from_top * lower
    tl.store(out + row * width * channels + offs, result.to(out.dtype.element_ty), in_bounds)


@jit
def source(
    index: tl.tensor, step: tl.tensor, length: tl.tensor, align_corners: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the two source positions of a position of the result, and its distance from the first one."""
    position = index.to(tl.float32) * step
    if not align_corners:
        position = tl.maximum((index.to(tl.float32) + 0.5) * step - 0.5, 0.0)
    first = tl.minimum(position.to(tl.int32), length - 1)
    return first, tl.minimum(first + 1, length - 1), tl.minimum(position - first.to(tl.float32), 1.0)
