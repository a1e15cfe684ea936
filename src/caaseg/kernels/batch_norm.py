"""Batch normalization in training, with residual addition and ReLU: autograd function, Triton kernels and launches.

A residual network spends half of its training step on a GPU in these operations: torch reads and writes the features
once for each of them, forward and backward. The kernels take two passes over the features forward, and two backward.

A map is a matrix (rows, C): one row per pixel, channels last. Each program sums some rows of some channels into its own
entry of a buffer of partial sums and a second kernel adds them up, so results are deterministic. Kernels traverse the
rows in alternating order: the data written last by one kernel is still cached when the next one starts.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from caaseg.kernels.common import ceil_div, jit, next_power_of_2, on_device, raise_if_double_backward

NUM_PROGRAMS = 264  # programs of a summing kernel: two per multiprocessor of a large GPU
FEW_CHANNELS_PROGRAMS = 1056  # the same for maps of at most 64 channels, whose tiles have more rows
TILE_ELEMENTS = 4096
UNROLL = 4  # tiles that a summing program loads at a time
TILES_PER_PROGRAM = 8  # in elementwise kernels
TINY = 1e-30  # eps that changes no variance, but avoids a division by zero


def batch_norm(
    features: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float,
    eps: float,
    relu: bool,
    duplicate: bool = False,
    group: Any = None,
) -> Any:
    """Normalize features over a batch, add the residual and apply ReLU; update the running statistics in place.

    Args:
        features: (N, C, H, W), channels last in memory.
        residual: a map of the same shape and dtype to add before ReLU, or None.
        weight, bias, running_mean, running_var: (C,).
        momentum, eps: as in `torch.nn.BatchNorm2d`.
        relu: whether to apply ReLU.
        duplicate: return the result twice. The backward kernels then sum its two gradients.
        group: process group that normalizes its batches together, all of the same size; None for this batch only.

    Returns:
        The result, (N, C, H, W), or a tuple of two such tensors with `duplicate`.
    """
    options = (momentum, eps, relu, duplicate, group)
    return _BatchNorm.apply(features, residual, weight, bias, running_mean, running_var, *options)  # type: ignore[no-untyped-call]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
        duplicate: bool,
        group: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        layout = Layout(features)
        rows, c = layout.rows, layout.channels
        parts, moments = layout.new_parts(features), features.new_empty(2, c, dtype=torch.float32)
        result = torch.empty_like(features)
        # A 1-bit ReLU mask per element: the backward pass reads it instead of the result.
        mask = layout.new_mask(features) if relu and residual is not None else None
        with on_device(features):
            moments_kernel[layout.sums_grid](
                features, parts, rows, c, layout.program_rows, **layout.blocks, unroll=UNROLL
            )
            program_rows = layout.program_rows
            if group is not None:  # each rank becomes one part
                parts = _parts_of_ranks(parts, layout, group)
                rows, program_rows = rows * dist.get_world_size(group), rows
            merge_moments_kernel[layout.merge_grid](
                parts, moments, running_mean, running_var, parts.shape[1], rows, c, program_rows, momentum, eps,
                **layout.merge_blocks,
            )  # fmt: skip
            rows = layout.rows
            normalize_kernel[layout.elementwise_grid](
                features, residual, moments, weight, bias, result, mask, rows, c,
                has_residual=residual is not None, relu=relu, **layout.blocks, tiles_per_program=TILES_PER_PROGRAM,
            )  # fmt: skip
        ctx.relu, ctx.has_residual, ctx.group = relu, residual is not None, group
        ctx.save_for_backward(features, mask, moments, weight, bias)
        return (result, result.detach()) if duplicate else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        raise_if_double_backward("use a model without fused batch normalization")
        features, mask, moments, weight, bias = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        if grad2 is not None:
            grad2 = grad2.contiguous(memory_format=torch.channels_last)
        layout = Layout(features)
        rows, c = layout.rows, layout.channels
        parts, sums, grad_features = layout.new_parts(features), torch.empty_like(moments), torch.empty_like(features)
        # The gradient of the residual is the incoming gradient, masked if there is a ReLU.
        has_mask = ctx.has_residual and ctx.relu
        if grad2 is not None and not has_mask:
            grad, grad2 = grad + grad2, None
        grad_residual = torch.empty_like(grad) if has_mask else grad
        with on_device(features):
            grad_sums_kernel[layout.sums_grid](
                grad, grad2, features, mask, moments, weight, bias, grad_residual, parts, rows, c, layout.program_rows,
                has_mask=has_mask, has_grad2=grad2 is not None, relu=ctx.relu, **layout.blocks, unroll=UNROLL,
            )  # fmt: skip
            merge_grad_sums_kernel[layout.merge_grid](parts, sums, parts.shape[1], c, **layout.merge_blocks)
            mean_sums = sums if ctx.group is None else _mean_over_ranks(sums, ctx.group)
            grad_features_kernel[layout.elementwise_grid](
                grad_residual, features, moments, weight, bias, mean_sums, grad_features, rows, c,
                apply_relu=ctx.relu and not has_mask, **layout.blocks, tiles_per_program=TILES_PER_PROGRAM,
            )  # fmt: skip
        grad_bias, grad_weight = sums.to(weight.dtype)
        grads = grad_features, grad_residual if ctx.has_residual else None, grad_weight, grad_bias
        return *grads, None, None, None, None, None, None, None


def _parts_of_ranks(parts: Tensor, layout: "Layout", group: Any) -> Tensor:
    """Merge the parts of this rank to one and gather those of all ranks, (2, programs, C) -> (2, ranks, C)."""
    own, unused = parts.new_empty(2, layout.channels), parts.new_zeros(2, layout.channels)
    merge_moments_kernel[layout.merge_grid](
        parts, own, unused[0], unused[1], parts.shape[1], layout.rows, layout.channels, layout.program_rows, 0.0, TINY,
        **layout.merge_blocks,
    )  # fmt: skip
    own[1] = layout.rows / own[1].square()  # from 1 / std to the sum of squared differences
    gathered = parts.new_zeros(2, dist.get_world_size(group), layout.channels)
    gathered[:, dist.get_rank(group)] = own
    dist.all_reduce(gathered, group=group)  # adds zeros
    return gathered


def _mean_over_ranks(sums: Tensor, group: Any) -> Tensor:
    mean = sums / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    return mean


class Layout:
    """Grids and block sizes for a map."""

    def __init__(self, features: Tensor) -> None:
        n, c, height, width = features.shape
        self.rows, self.channels = n * height * width, c
        block_c = min(max(next_power_of_2(c), 16), 128)
        block = TILE_ELEMENTS // block_c
        column_blocks, row_blocks = ceil_div(c, block_c), ceil_div(self.rows, block)
        # An odd number of tiles, so that programs do not all start in the same memory bank.
        programs = NUM_PROGRAMS if block_c == 128 else FEW_CHANNELS_PROGRAMS
        self.program_rows = (ceil_div(row_blocks, max(programs // column_blocks, 1)) | 1) * block
        self.blocks = {"block": block, "block_c": block_c}
        self.sums_grid = (ceil_div(self.rows, self.program_rows), column_blocks)
        self.elementwise_grid = (ceil_div(row_blocks, TILES_PER_PROGRAM), column_blocks)
        self.merge_grid = (ceil_div(c, 16),)
        # Few programs merge partial sums, one block after another: large blocks take fewer iterations.
        many = self.sums_grid[0] > 64
        self.merge_blocks = {"block": 256 if many else 64, "block_c": 16, "num_warps": 8 if many else 4}

    def new_mask(self, features: Tensor) -> Tensor:
        shape = (self.elementwise_grid[1], self.rows, self.blocks["block_c"] // 8)
        return features.new_empty(shape, dtype=torch.uint8)

    def new_parts(self, features: Tensor) -> Tensor:
        return features.new_empty(2, self.sums_grid[0], self.channels, dtype=torch.float32)


@jit
def _load(pointer: tl.tensor, offs_r: tl.tensor, rows: tl.tensor, offs_c: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Load a tile (rows, channels) as float32; zeros out of bounds."""
    in_bounds = (offs_r < rows)[:, None] & (offs_c < channels)[None, :]
    return tl.load(pointer + offs_r.to(tl.int64)[:, None] * channels + offs_c[None, :], in_bounds, other=0.0).to(
        tl.float32
    )


@jit
def _store(
    pointer: tl.tensor, tile: tl.tensor, offs_r: tl.tensor, rows: tl.tensor, offs_c: tl.tensor, channels: tl.tensor
) -> None:
    """Store a tile where `_load` loads it from, in the dtype of the pointer."""
    in_bounds = (offs_r < rows)[:, None] & (offs_c < channels)[None, :]
    address = pointer + offs_r.to(tl.int64)[:, None] * channels + offs_c[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), in_bounds)


@jit
def _load_channels(pointer: tl.tensor, offs_c: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Load a vector of some channels as float32."""
    return tl.load(pointer + offs_c, offs_c < channels, other=0.0).to(tl.float32)


@jit
def moments_kernel(
    features: tl.tensor,  # (rows, C)
    parts: tl.tensor,  # (2, programs, C) float32: mean of a program's rows, and sum of squared differences from it
    rows: tl.tensor,
    channels: tl.tensor,
    program_rows: tl.tensor,  # rows per program
    block: tl.constexpr,
    block_c: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    """Compute mean and squared differences of some rows, from x - x0 with x0 the first row, to avoid cancellation."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    shift = _load_channels(features + (part * program_rows).to(tl.int64) * channels, offs_c, channels)[None, :]
    total = tl.zeros([block, block_c], tl.float32)
    squares = tl.zeros([block, block_c], tl.float32)
    end = tl.minimum((part + 1) * program_rows, rows)
    for start in tl.range(part * program_rows, end, block, loop_unroll_factor=unroll):  # unrolled to overlap loads
        offs_r = start + tl.arange(0, block)
        tile = tl.where((offs_r < rows)[:, None], _load(features, offs_r, rows, offs_c, channels) - shift, 0.0)
        total += tile
        squares += tile * tile
    count = tl.minimum(program_rows, rows - part * program_rows)
    offset = tl.sum(total, 0) / count  # difference between the mean and x0
    address = parts + part * channels + offs_c
    x0 = _load_channels(features + (part * program_rows).to(tl.int64) * channels, offs_c, channels)
    tl.store(address, x0 + offset, offs_c < channels)
    sum_squares = tl.sum(squares, 0) - offset * offset * count
    tl.store(address + tl.num_programs(0) * channels, sum_squares, offs_c < channels)


@jit
def merge_moments_kernel(
    parts: tl.tensor,
    moments: tl.tensor,  # (2, C) float32: mean and 1 / std
    running_mean: tl.tensor,  # (C,), updated in place
    running_var: tl.tensor,
    num_parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    program_rows: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Merge the moments of all parts (Chan, Golub and LeVeque) and update the running statistics."""
    offs_c = tl.program_id(0) * block_c + tl.arange(0, block_c)
    in_bounds = offs_c < channels
    shift = _load_channels(parts, offs_c, channels)[None, :]
    total = tl.zeros([block, block_c], tl.float32)
    for start in range(0, num_parts, block):
        part = start + tl.arange(0, block)
        count = tl.minimum(program_rows, rows - part * program_rows).to(tl.float32)[:, None]
        total += tl.where(
            (part < num_parts)[:, None], count * (_load(parts, part, num_parts, offs_c, channels) - shift), 0.0
        )
    mean = _load_channels(parts, offs_c, channels) + tl.sum(total, 0) / rows
    sum_squares = tl.zeros([block, block_c], tl.float32)
    for start in range(0, num_parts, block):
        part = start + tl.arange(0, block)
        count = tl.minimum(program_rows, rows - part * program_rows).to(tl.float32)[:, None]
        diff = _load(parts, part, num_parts, offs_c, channels) - mean[None, :]
        squares = _load(parts + num_parts * channels, part, num_parts, offs_c, channels)
        sum_squares += tl.where((part < num_parts)[:, None], squares + count * diff * diff, 0.0)
    # NaN must propagate, so that the loss shows it.
    variance = tl.maximum(tl.sum(sum_squares, 0) / rows, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(moments + offs_c, mean, in_bounds)
    tl.store(moments + channels + offs_c, tl.div_rn(1.0, tl.sqrt_rn(variance + eps)), in_bounds)
    old_mean, old_var = _load_channels(running_mean, offs_c, channels), _load_channels(running_var, offs_c, channels)
    unbiased = variance * (rows / (rows - 1.0))
    new_mean = old_mean + momentum * (mean - old_mean)
    new_var = old_var + momentum * (unbiased - old_var)
    tl.store(running_mean + offs_c, new_mean.to(running_mean.dtype.element_ty), in_bounds)
    tl.store(running_var + offs_c, new_var.to(running_var.dtype.element_ty), in_bounds)


@jit
def _load_scales(
    moments: tl.tensor, weight: tl.tensor, bias: tl.tensor, offs_c: tl.tensor, channels: tl.tensor
) -> tl.tensor:
    """Load mean, 1 / std, weight and bias. Call it before a loop: the compiler would reload them after each store."""
    return (
        _load_channels(moments, offs_c, channels)[None, :],
        _load_channels(moments + channels, offs_c, channels)[None, :],
        _load_channels(weight, offs_c, channels)[None, :],
        _load_channels(bias, offs_c, channels)[None, :],
    )


@jit
def _mask_address(mask: tl.tensor, offs_r: tl.tensor, rows: tl.tensor, block_c: tl.constexpr) -> tl.tensor:
    """Return the addresses of the mask bytes of some rows and one block of channels, contiguous per program."""
    start = tl.program_id(1) * rows.to(tl.int64)
    return mask + (start + offs_r)[:, None] * (block_c // 8) + tl.arange(0, block_c // 8)[None, :]


@jit
def _store_mask(
    mask: tl.tensor, tile: tl.tensor, offs_r: tl.tensor, rows: tl.tensor, block: tl.constexpr, block_c: tl.constexpr
) -> None:
    """Store 1 for elements above zero and NaN, 0 for others: eight channels per byte."""
    bits = tl.where(tile <= 0, 0, 1).reshape([block, block_c // 8, 8]) << tl.arange(0, 8)[None, None, :]
    tl.store(_mask_address(mask, offs_r, rows, block_c), tl.sum(bits, 2).to(tl.uint8), (offs_r < rows)[:, None])


@jit
def _load_mask(
    mask: tl.tensor, offs_r: tl.tensor, rows: tl.tensor, block: tl.constexpr, block_c: tl.constexpr
) -> tl.tensor:
    """Load a tile (rows, channels) of mask bits."""
    bits = tl.load(_mask_address(mask, offs_r, rows, block_c), (offs_r < rows)[:, None], other=0).to(tl.int32)
    return (bits[:, :, None] >> tl.arange(0, 8)[None, None, :] & 1).reshape([block, block_c])


@jit
def normalize_kernel(
    features: tl.tensor,  # (rows, C)
    residual: tl.tensor,  # (rows, C) if has_residual
    moments: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,  # (rows, C)
    mask: tl.tensor,  # (blocks of channels, rows, block_c / 8) uint8, if has_residual and relu
    rows: tl.tensor,
    channels: tl.tensor,
    has_residual: tl.constexpr,
    relu: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    tiles_per_program: tl.constexpr,
) -> None:
    """Normalize, add the residual, apply ReLU."""
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mean, rstd, weight_row, bias_row = _load_scales(moments, weight, bias, offs_c, channels)
    for step in range(tiles_per_program):
        offs_r = (tl.program_id(0) * tiles_per_program + step) * block + tl.arange(0, block)
        tile = (_load(features, offs_r, rows, offs_c, channels) - mean) * rstd * weight_row + bias_row
        if has_residual:
            tile += _load(residual, offs_r, rows, offs_c, channels)
        if relu:
            tile = tl.maximum(tile, 0.0, propagate_nan=tl.PropagateNan.ALL)  # like torch
        _store(result, tile, offs_r, rows, offs_c, channels)
        if has_residual and relu:
            _store_mask(mask, tile.to(result.dtype.element_ty), offs_r, rows, block, block_c)


@jit
def grad_sums_kernel(
    grad: tl.tensor,  # (rows, C), of the result
    grad2: tl.tensor,  # (rows, C), to be added to grad, if has_grad2
    features: tl.tensor,
    mask: tl.tensor,  # from `normalize_kernel`, if has_mask
    moments: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    grad_residual: tl.tensor,  # (rows, C): masked gradient, if has_mask
    parts: tl.tensor,  # (2, programs, C) float32: sums of the masked gradient and of its product with x normalized
    rows: tl.tensor,
    channels: tl.tensor,
    program_rows: tl.tensor,
    has_mask: tl.constexpr,
    has_grad2: tl.constexpr,
    relu: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    """Compute the sums of some rows for the gradients of weight, bias and features."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mean, rstd, weight_row, bias_row = _load_scales(moments, weight, bias, offs_c, channels)
    total = tl.zeros([block, block_c], tl.float32)
    products = tl.zeros([block, block_c], tl.float32)
    end = tl.minimum((part + 1) * program_rows, rows)
    for start in tl.range(part * program_rows, end, block, loop_unroll_factor=unroll):
        offs_r = start + tl.arange(0, block)
        grad_tile = _load(grad, offs_r, rows, offs_c, channels)
        if has_grad2:
            grad_tile += _load(grad2, offs_r, rows, offs_c, channels)
        normalized = (_load(features, offs_r, rows, offs_c, channels) - mean) * rstd
        if has_mask:
            grad_tile = tl.where(_load_mask(mask, offs_r, rows, block, block_c) == 0, 0.0, grad_tile)
            _store(grad_residual, grad_tile, offs_r, rows, offs_c, channels)
        elif relu:  # without a residual the sign is recomputed
            grad_tile = tl.where(normalized * weight_row + bias_row <= 0, 0.0, grad_tile)
        total += grad_tile
        products += grad_tile * normalized
    address = parts + part * channels + offs_c
    tl.store(address, tl.sum(total, 0), offs_c < channels)
    tl.store(address + tl.num_programs(0) * channels, tl.sum(products, 0), offs_c < channels)


@jit
def merge_grad_sums_kernel(
    parts: tl.tensor,
    sums: tl.tensor,  # (2, C): gradients of bias and weight
    num_parts: tl.tensor,
    channels: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Add up the partial sums: the gradients of bias and weight."""
    offs_c = tl.program_id(0) * block_c + tl.arange(0, block_c)
    for k in tl.static_range(2):
        total = tl.zeros([block, block_c], tl.float32)
        for start in range(0, num_parts, block):
            offs_part = start + tl.arange(0, block)
            total += _load(parts + k * num_parts * channels, offs_part, num_parts, offs_c, channels)
        tl.store(sums + k * channels + offs_c, tl.sum(total, 0), offs_c < channels)


@jit
def grad_features_kernel(
    grad: tl.tensor,  # (rows, C), of the result; already masked unless apply_relu
    features: tl.tensor,
    moments: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,  # (2, C)
    grad_features: tl.tensor,  # (rows, C)
    rows: tl.tensor,
    channels: tl.tensor,
    apply_relu: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    tiles_per_program: tl.constexpr,
) -> None:
    """Compute the gradient of the features: remove its mean and its projection on the normalized features."""
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mean, rstd, weight_row, bias_row = _load_scales(moments, weight, bias, offs_c, channels)
    grad_mean = (_load_channels(sums, offs_c, channels) / rows)[None, :]
    grad_dot = (_load_channels(sums + channels, offs_c, channels) / rows)[None, :]
    for step in range(tiles_per_program):
        offs_r = (tl.program_id(0) * tiles_per_program + step) * block + tl.arange(0, block)
        grad_tile = _load(grad, offs_r, rows, offs_c, channels)
        normalized = (_load(features, offs_r, rows, offs_c, channels) - mean) * rstd
        if apply_relu:
            grad_tile = tl.where(normalized * weight_row + bias_row <= 0, 0.0, grad_tile)
        grad_tile = weight_row * rstd * (grad_tile - grad_mean - normalized * grad_dot)
        _store(grad_features, grad_tile, offs_r, rows, offs_c, channels)
