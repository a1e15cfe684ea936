"""Attention along the lines of a feature map, backward: Triton kernels and their launches.

A line that fits into one block takes one kernel. A longer line takes three passes over its blocks: the softmax terms
`delta`, then the gradient of the values and the gate, then the gradient of the keys. `axial_forward` describes the
layout.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from caaseg.kernels.axial_forward import (
    MAX_SINGLE_BLOCK,
    Lines,
    attention_scores,
    line_start,
    load_gate,
)
from caaseg.kernels.common import (
    accumulate,
    ceil_div,
    dot,
    dot_float32,
    exp,
    jit,
    load_tile,
    next_power_of_2,
    on_device,
    reciprocal,
    store_tile,
)

BLOCK = 64  # positions per block of longer lines
# Loops whose products read values computed in the same iteration run in one pipeline stage. With two or three stages,
# Triton 3.6 on an H200 gave key gradients that differed from run to run; the cause is not known.
SINGLE_STAGE = {"num_stages": 1}


class Blocks(NamedTuple):
    """Block sizes of a program."""

    positions: int
    channels: int
    key_channels: int
    warps: int
    single: bool  # one block holds a line

    @classmethod
    def of(cls, lines: Lines, keys: Tensor, values: Tensor) -> "Blocks":
        float32 = values.dtype == torch.float32
        single = lines.length <= (MAX_SINGLE_BLOCK // 4 if float32 else MAX_SINGLE_BLOCK)
        positions = max(next_power_of_2(lines.length), 16) if single else (BLOCK // 2 if float32 else BLOCK)
        channels = min(max(next_power_of_2(values.shape[1]), 16), 32 if float32 else 64)
        key_channels = max(next_power_of_2(keys.shape[1]), 16)
        return cls(positions, channels, key_channels, 8 if positions > 64 else 4, single)


def attend_lines_backward(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    stats: Tensor,
    grad: Tensor,
    grad_pooled: Tensor | None,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of keys, values and gate (empty without a gate) of `attend_lines`.

    Args:
        keys, values, gate, rows: as passed to `attend_lines`.
        stats: as returned by `attend_lines`.
        grad: gradient of the output, (N, C, H, W), channels last in memory.
        grad_pooled: gradient of the pooled output, (N, L, C), or None.
    """
    n, c = values.shape[:2]
    d = keys.shape[1]
    lines = Lines.of(values, rows)
    blocks = Blocks.of(lines, keys, values)
    num_lines = n * lines.number
    pool_scale = 1 / (lines.number * lines.length)
    grad_keys, grad_values = torch.empty_like(keys), torch.empty_like(values)
    options = {
        "gated": gate is not None, "pooled": grad_pooled is not None,
        "block_d": blocks.key_channels, "block": blocks.positions, "block_c": blocks.channels,
        "num_warps": blocks.warps, **SINGLE_STAGE,
    }  # fmt: skip
    if blocks.single:
        grad_gate = values.new_empty(n, lines.number, c if gate is not None else 0)
        with on_device(values):
            attention_backward_kernel[(num_lines,)](
                keys, values, gate, grad, grad_pooled, grad_keys, grad_values, grad_gate, *lines, c, d, pool_scale,
                **options,
            )  # fmt: skip
        return grad_keys, grad_values, grad_gate
    num_blocks = ceil_div(lines.length, blocks.positions)
    deltas = torch.empty_like(stats[0])
    grad_gates = values.new_empty(n, lines.number, num_blocks, c if gate is not None else 0, dtype=torch.float32)
    with on_device(values):
        delta_kernel[(num_lines, num_blocks)](
            keys, values, gate, stats, grad, grad_pooled, deltas, *lines, c, d, pool_scale, **options
        )
        values_backward_kernel[(num_lines, num_blocks, ceil_div(c, blocks.channels))](
            keys, values, gate, stats, grad, grad_pooled, grad_values, grad_gates, *lines, c, d, pool_scale, **options
        )
        keys_backward_kernel[(num_lines, num_blocks)](
            keys, values, gate, stats, deltas, grad, grad_pooled, grad_keys, *lines, c, d, pool_scale, **options
        )
    return grad_keys, grad_values, grad_gates.sum(2).to(values.dtype)


@jit
def load_softmax_stats(stats: tl.tensor, line: tl.tensor, offs_q: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Load max_score and inv_sum of positions of a line."""
    address = stats + line * length + offs_q
    max_score = tl.load(address, offs_q < length, other=0.0)
    return max_score, tl.load(address + tl.num_programs(0) * length, offs_q < length, other=0.0)


@jit
def load_grad_out(
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    image: tl.tensor,
    start: tl.tensor,
    offs_q: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    offs_c: tl.tensor,
    channels: tl.tensor,
    pool_scale: tl.tensor,
    pooled: tl.constexpr,
) -> tl.tensor:
    """Load the gradient of the output; if `pooled`, add the gradient that arrives through the pooled output."""
    tile = load_tile(grad, start, offs_q, length, stride, offs_c, channels)
    if pooled:
        from_pooled = load_tile(grad_pooled, image * length, offs_q, length, 1, offs_c, channels)
        tile = (tile.to(tl.float32) + from_pooled.to(tl.float32) * pool_scale).to(tile.dtype)
    return tile


@jit
def attention_backward_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    grad: tl.tensor,  # (pixels, C), of the output
    grad_pooled: tl.tensor,  # (N * length, C) if pooled
    grad_keys: tl.tensor,  # (pixels, D)
    grad_values: tl.tensor,  # (pixels, C)
    grad_gate: tl.tensor,  # (N * num_lines, C)
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    pool_scale: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Compute all gradients of a line that fits into one block, reading and writing every map once."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    image, start = line // num_lines, line_start(line, num_lines, length, line_stride)
    offs_q = tl.arange(0, block)
    offs_d = tl.arange(0, block_d)
    line_keys = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)
    scores = attention_scores(line_keys, line_keys, offs_q, length)
    exps = exp(scores - tl.max(scores, 1)[:, None], exact)
    weights = tl.where((offs_q < length)[:, None], exps * reciprocal(tl.sum(exps, 1), exact)[:, None], 0.0)
    weights_t = tl.trans(weights.to(values.dtype.element_ty))

    grad_weights = tl.zeros([block, block], tl.float32)
    for c in range(0, channels, block_c):
        offs_c = c + tl.arange(0, block_c)
        grad_out = load_grad_out(
            grad, grad_pooled, image, start, offs_q, length, stride, offs_c, channels, pool_scale, pooled
        )
        tile = load_tile(values, start, offs_q, length, stride, offs_c, channels)
        grad_v = dot(weights_t, grad_out)
        if gated:
            # The gate is constant along the line: it factors out of both sums, and its gradient needs no output values.
            factor = load_gate(gate, line, offs_c, channels)
            grad_g = tl.sum(grad_v * tile.to(tl.float32), 0)
            tl.store(grad_gate + line * channels + offs_c, grad_g.to(grad_gate.dtype.element_ty), offs_c < channels)
            grad_v *= factor
            grad_out = (grad_out.to(tl.float32) * factor).to(grad_out.dtype)
        store_tile(grad_values, grad_v, start, offs_q, length, stride, offs_c, channels)
        grad_weights = accumulate(grad_weights, dot(grad_out, tl.trans(tile)), length, exact)
    grad_scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None])
    both = grad_scores + tl.trans(grad_scores)  # as query and as key
    store_tile(grad_keys, dot_float32(both, line_keys), start, offs_q, length, stride, offs_d, key_channels)


@jit
def delta_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    stats: tl.tensor,
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    deltas: tl.tensor,  # (N * num_lines, length) float32
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    pool_scale: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Compute the sum of weights times their gradients, which the softmax gradient subtracts."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    image, start = line // num_lines, line_start(line, num_lines, length, line_stride)
    offs_q = tl.program_id(1) * block + tl.arange(0, block)
    offs_d = tl.arange(0, block_d)
    queries = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)
    max_score, inv_sum = load_softmax_stats(stats, line, offs_q, length)
    delta = tl.zeros([block], tl.float32)
    for block_start in range(0, length, block):
        offs_k = block_start + tl.arange(0, block)
        grad_weights = tl.zeros([block, block], tl.float32)
        for c in range(0, channels, block_c):
            offs_c = c + tl.arange(0, block_c)
            grad_out = load_grad_out(
                grad, grad_pooled, image, start, offs_q, length, stride, offs_c, channels, pool_scale, pooled
            )
            if gated:
                factor = load_gate(gate, line, offs_c, channels)
                grad_out = (grad_out.to(tl.float32) * factor).to(grad_out.dtype)
            tile = load_tile(values, start, offs_k, length, stride, offs_c, channels)
            grad_weights = accumulate(grad_weights, dot(grad_out, tl.trans(tile)), length, exact)
        keys_block = load_tile(keys, start, offs_k, length, stride, offs_d, key_channels)
        scores = attention_scores(queries, keys_block, offs_k, length)
        weights = exp(scores - max_score[:, None], exact) * inv_sum[:, None]
        delta += tl.sum(weights * grad_weights, 1)
    tl.store(deltas + line * length + offs_q, delta, offs_q < length)


@jit
def values_backward_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    stats: tl.tensor,
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    grad_values: tl.tensor,
    grad_gate: tl.tensor,  # (N * num_lines, blocks, C) float32: partial sums per block
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    pool_scale: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Compute the gradient of a block of values, and the partial sum of that block for the gradient of the gate."""
    line, part = tl.program_id(0), tl.program_id(1)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    image, start = line // num_lines, line_start(line, num_lines, length, line_stride)
    offs_k = part * block + tl.arange(0, block)
    offs_d = tl.arange(0, block_d)
    offs_c = tl.program_id(2) * block_c + tl.arange(0, block_c)
    keys_block = load_tile(keys, start, offs_k, length, stride, offs_d, key_channels)
    grad_v = tl.zeros([block, block_c], tl.float32)
    for block_start in range(0, length, block):
        offs_q = block_start + tl.arange(0, block)
        queries = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)
        max_score, inv_sum = load_softmax_stats(stats, line, offs_q, length)
        scores = attention_scores(keys_block, queries, offs_q, length)  # transposed
        weights = exp(scores - max_score[None, :], exact) * inv_sum[None, :]
        grad_out = load_grad_out(
            grad, grad_pooled, image, start, offs_q, length, stride, offs_c, channels, pool_scale, pooled
        )
        grad_v = accumulate(grad_v, dot(weights.to(grad_out.dtype), grad_out), length, exact)
    if gated:
        tile = load_tile(values, start, offs_k, length, stride, offs_c, channels)
        grad_g = tl.sum(tl.where((offs_k < length)[:, None], grad_v * tile.to(tl.float32), 0.0), 0)
        tl.store(grad_gate + (line * tl.num_programs(1) + part) * channels + offs_c, grad_g, offs_c < channels)
        grad_v *= load_gate(gate, line, offs_c, channels)
    store_tile(grad_values, grad_v, start, offs_k, length, stride, offs_c, channels)


@jit
def keys_backward_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    stats: tl.tensor,
    deltas: tl.tensor,
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    grad_keys: tl.tensor,
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    pool_scale: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Compute the gradient of a block of keys, from their use as queries and as keys."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    image, start = line // num_lines, line_start(line, num_lines, length, line_stride)
    offs_q = tl.program_id(1) * block + tl.arange(0, block)
    offs_d = tl.arange(0, block_d)
    keys_block = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)
    max_score, inv_sum = load_softmax_stats(stats, line, offs_q, length)
    delta = tl.load(deltas + line * length + offs_q, offs_q < length, other=0.0)
    result = tl.zeros([block, block_d], tl.float32)
    for block_start in range(0, length, block):
        offs_other = block_start + tl.arange(0, block)
        others = load_tile(keys, start, offs_other, length, stride, offs_d, key_channels)
        as_query = tl.zeros([block, block], tl.float32)
        as_key = tl.zeros([block, block], tl.float32)
        for c in range(0, channels, block_c):
            offs_c = c + tl.arange(0, block_c)
            grad_own = load_grad_out(
                grad, grad_pooled, image, start, offs_q, length, stride, offs_c, channels, pool_scale, pooled
            )
            grad_other = load_grad_out(
                grad, grad_pooled, image, start, offs_other, length, stride, offs_c, channels, pool_scale, pooled
            )
            if gated:
                factor = load_gate(gate, line, offs_c, channels)
                grad_own = (grad_own.to(tl.float32) * factor).to(grad_own.dtype)
                grad_other = (grad_other.to(tl.float32) * factor).to(grad_other.dtype)
            tile_other = tl.trans(load_tile(values, start, offs_other, length, stride, offs_c, channels))
            as_query = accumulate(as_query, dot(grad_own, tile_other), length, exact)
            tile = load_tile(values, start, offs_q, length, stride, offs_c, channels)
            as_key = accumulate(as_key, dot(tile, tl.trans(grad_other)), length, exact)
        inside = (offs_q < length)[:, None] & (offs_other < length)[None, :]
        scores = dot(keys_block, tl.trans(others))
        other_max, other_inv_sum = load_softmax_stats(stats, line, offs_other, length)
        other_delta = tl.load(deltas + line * length + offs_other, offs_other < length, other=0.0)
        weights_own = tl.where(inside, exp(scores - max_score[:, None], exact) * inv_sum[:, None], 0.0)
        weights_other = tl.where(inside, exp(scores - other_max[None, :], exact) * other_inv_sum[None, :], 0.0)
        both = weights_own * (as_query - delta[:, None]) + weights_other * (as_key - other_delta[None, :])
        result = accumulate(result, dot_float32(both, others), length, exact)
    store_tile(grad_keys, result, start, offs_q, length, stride, offs_d, key_channels)
