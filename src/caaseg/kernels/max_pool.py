"""Max pooling of 3 x 3 windows with stride 2 and padding 1: autograd function, Triton kernels and their launches.

Torch stores the position of each maximum in 8 bytes, and its backward pass is slow for maps that are channels last.
These kernels store it in 1 byte. Each program writes its own part of the result, so results are deterministic.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from caaseg.kernels.common import ceil_div, jit, on_device, raise_if_double_backward

BLOCK = 1024  # elements per program, of one row of the result


def max_pool(features: Tensor) -> Tensor:
    """Pool like `torch.nn.functional.max_pool2d(features, 3, 2, 1)`: (N, C, H, W) -> (N, C, ceil(H / 2), ceil(W / 2)).

    Features must be channels last in memory.
    """
    if torch.is_grad_enabled() and features.requires_grad:
        result: Tensor = _MaxPool.apply(features)  # type: ignore[no-untyped-call]
        return result
    return _pool(features, save_positions=False)[0]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        result, positions = _pool(features, save_positions=True)
        ctx.shape = features.shape
        ctx.save_for_backward(positions)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise_if_double_backward("use a model whose max pooling is not fused")
        (positions,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        n, c, height, width = ctx.shape
        grad_features = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        with on_device(grad):
            max_pool_backward_kernel[(n * height, ceil_div(width * c, BLOCK))](
                grad, positions, grad_features, height, width, *grad.shape[2:], channels=c, block=BLOCK
            )
        return grad_features


def _pool(features: Tensor, *, save_positions: bool) -> tuple[Tensor, Tensor | None]:
    n, c, height, width = features.shape
    shape = (n, c, ceil_div(height, 2), ceil_div(width, 2))
    empty: dict[str, Any] = {"device": features.device, "memory_format": torch.channels_last}
    result = torch.empty(shape, dtype=features.dtype, **empty)
    positions = torch.empty(shape, dtype=torch.uint8, **empty) if save_positions else None
    with on_device(features):
        max_pool_kernel[(n * shape[2], ceil_div(shape[3] * c, BLOCK))](
            features, result, positions, height, width, *shape[2:],
            channels=c, save_positions=save_positions, block=BLOCK,
        )  # fmt: skip
    return result, positions


@jit
def max_pool_kernel(
    features: tl.tensor,  # (N * height * width, C)
    result: tl.tensor,  # (N * h * w, C)
    positions: tl.tensor,  # (N * h * w, C) uint8: 3 * row + column in the window, if save_positions
    height: tl.tensor,
    width: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    channels: tl.constexpr,  # constant, because every offset is divided by it
    save_positions: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute a part of an image row of the result. Elements of a row are consecutive in memory. NaN propagates."""
    row = tl.program_id(0).to(tl.int64)
    image, top = row // h, (row % h).to(tl.int32) * 2 - 1
    offs = tl.program_id(1) * block + tl.arange(0, block)
    left, c = offs // channels * 2 - 1, offs % channels
    best = tl.full([block], float("-inf"), tl.float32)
    position = tl.where(top < 0, 3, 0) + tl.where(left < 0, 1, 0)  # the first position inside the map
    for k in tl.static_range(9):
        y, x = top + k // 3, left + k % 3
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (offs < w * channels)
        address = features + ((image * height + y) * width + x) * channels + c
        value = tl.load(address, inside, other=float("-inf")).to(tl.float32)
        is_larger = (value > best) | (value != value)
        best = tl.where(is_larger, value, best)
        position = tl.where(is_larger, k, position)
    address = row * w * channels + offs
    tl.store(result + address, best.to(result.dtype.element_ty), offs < w * channels)
    if save_positions:
        tl.store(positions + address, position.to(tl.uint8), offs < w * channels)


@jit
def max_pool_backward_kernel(
    grad: tl.tensor,  # (N * h * w, C)
    positions: tl.tensor,  # (N * h * w, C) uint8
    grad_features: tl.tensor,  # (N * height * width, C)
    height: tl.tensor,
    width: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    channels: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute a part of an image row of the gradient: per pixel, the sum over the windows with their maximum there."""
    row = tl.program_id(0).to(tl.int64)
    image, y = row // height, (row % height).to(tl.int32)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    x, c = offs // channels, offs % channels
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(4):  # an even row or column is in one window, an odd one in two
        window_y, window_x = y // 2 + k // 2, x // 2 + k % 2
        inside = (window_y < h) & (window_x < w) & (k // 2 <= y % 2) & (k % 2 <= x % 2) & (offs < width * channels)
        address = ((image * h + window_y) * w + window_x) * channels + c
        position = tl.load(positions + address, inside, other=9)
        here = (y - 2 * window_y + 1) * 3 + x - 2 * window_x + 1
        value = tl.load(grad + address, inside, other=0.0).to(tl.float32)
        total += tl.where(position == here, value, 0.0)
    tl.store(
        grad_features + row * width * channels + offs, total.to(grad_features.dtype.element_ty), offs < width * channels
    )
