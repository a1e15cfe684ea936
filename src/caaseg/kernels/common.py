"""Triton functions shared by the operators: tiles in memory, matrix products, exponentials."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1), as in tests."""

H200_SHARED_MEMORY = 227 * 1024
MIN_SHARED_MEMORY = 64 * 1024  # of GPUs of compute capability 7.5

_FLOAT32_DOT = tl.constexpr(INTERPRETED)  # the interpreter multiplies the bits of bfloat16 as integers

jit: Callable[[Callable[..., Any]], Any] = triton.jit  # typed: mypy skips triton


def raise_if_double_backward(alternative: str) -> None:
    """Raise if autograd records a backward pass (create_graph=True): torch would silently drop its gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"gradients of GPU kernels cannot be differentiated again; {alternative}")


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context that makes the GPU of a tensor the current device, where Triton launches; no-op on the CPU."""
    context: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return context


def shared_memory_per_program(tensor: Tensor) -> int:
    """Return the bytes of shared memory that a program can use on the GPU of a tensor."""
    if not tensor.is_cuda:
        return H200_SHARED_MEMORY  # the interpreter has no limit
    properties = torch.cuda.get_device_properties(tensor.device)
    return int(getattr(properties, "shared_memory_per_block_optin", MIN_SHARED_MEMORY))


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up. `triton.cdiv` takes microseconds on the host."""
    return -(-a // b)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not smaller than a positive number."""
    return 1 << (number - 1).bit_length()


def try_kernel(device: torch.device) -> None:
    """Compile and run a small kernel. Raises an error if Triton does not work on a GPU."""
    out = torch.zeros(1, device=device)
    with on_device(out):
        _one_kernel[(1,)](out)


@jit
def _one_kernel(out: tl.tensor) -> None:
    tl.store(out, 1.0)


@jit
def load_tile(
    pointer: tl.tensor,
    start: tl.tensor,
    positions: tl.tensor,
    num_positions: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
) -> tl.tensor:
    """Load a tile (positions, channels) of a row-major matrix; zeros out of bounds.

    Position p is row `start + p * stride` of a matrix with `num_channels` columns.
    """
    mask = (positions < num_positions)[:, None] & (channels < num_channels)[None, :]
    address = pointer + start * num_channels + positions[:, None] * stride * num_channels + channels[None, :]
    return tl.load(address, mask, other=0.0)


@jit
def store_tile(
    pointer: tl.tensor,
    tile: tl.tensor,
    start: tl.tensor,
    positions: tl.tensor,
    num_positions: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
) -> None:
    """Store a tile where `load_tile` loads it from, in the dtype of the pointer."""
    mask = (positions < num_positions)[:, None] & (channels < num_channels)[None, :]
    address = pointer + start * num_channels + positions[:, None] * stride * num_channels + channels[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), mask)


@jit
def dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the matrix product in float32. Float32 operands are not rounded to TF32."""
    if _FLOAT32_DOT:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def dot_float32(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the product of a float32 matrix and a matrix of any dtype, without rounding the first to that dtype."""
    exact: tl.constexpr = b.dtype == tl.float32
    return tl.dot(a, b.to(tl.float32), input_precision="ieee" if exact else "tf32x3")


@jit
def accumulate(total: tl.tensor, product: tl.tensor, length: tl.tensor, exact: tl.constexpr) -> tl.tensor:
    """Return total + product.

    The compiler would accumulate the terms of all products into one sum. In float32, summing each product on its own
    first gives smaller rounding errors; a condition on `length`, which is always positive, enforces that.
    """
    if exact:
        product = tl.where(length > 0, product, 0.0)
    return total + product


@jit
def exp(x: tl.tensor, exact: tl.constexpr) -> tl.tensor:
    """Return the exponential of x <= 0. The GPU's instruction is off by several ulps, which matters in float32 only."""
    if exact:
        x = tl.maximum(x, -110.0, propagate_nan=tl.PropagateNan.ALL)  # exp(-110) is 0 in float32
        exponent = tl.floor(x * 1.4426950408889634 + 0.5)
        rest = tl.fma(exponent, -0.693145751953125, x)  # ln 2 in two parts, the first short enough to be exact
        rest = tl.fma(exponent, -1.428606765330187e-06, rest)
        series = tl.fma(rest, 1 / 5040, 1 / 720)
        series = tl.fma(rest, series, 1 / 120)
        series = tl.fma(rest, series, 1 / 24)
        series = tl.fma(rest, series, 1 / 6)
        series = tl.fma(rest, series, 0.5)
        series = tl.fma(rest, series, 1.0)
        return tl.fma(rest, series, 1.0) * tl.exp2(exponent)
    return tl.exp(x)


@jit
def reciprocal(x: tl.tensor, exact: tl.constexpr) -> tl.tensor:
    """Return 1 / x, correctly rounded if `exact`."""
    return tl.div_rn(1.0, x) if exact else 1 / x
