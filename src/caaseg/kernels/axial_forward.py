"""Attention along the lines of a feature map, forward: Triton kernels and their launches.

A map is stored channels last, pixel by pixel. A line is an image column or row: its position l is pixel
`start + l * stride`, and the next line starts `line_stride` pixels further. Each program computes one block of a line
and no two programs write to the same address, so results are deterministic.

Attention weights are never stored. Each kernel recomputes its block of them from the keys as
exp(score - max_score) * inv_sum. Scores are symmetric, because keys and queries are the same.

Names: offs_q, offs_k are positions of queries and keys, offs_c, offs_d channels of values and keys.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from caaseg.kernels.common import (
    accumulate,
    ceil_div,
    dot,
    exp,
    jit,
    load_tile,
    next_power_of_2,
    on_device,
    reciprocal,
    store_tile,
)

MAX_SINGLE_BLOCK = 128  # longest line whose weights and weight gradients fit into registers
BLOCK = 64  # positions per block of longer lines
TAIL = 16  # positions per tail block, for lines slightly longer than a power of two
# Loops whose products read values computed in the same iteration run in one pipeline stage. With two or three stages,
# Triton 3.6 on an H200 gave key gradients that differed from run to run; the cause is not known.
SINGLE_STAGE = {"num_stages": 1}


class Lines(NamedTuple):
    """Layout of the lines of a map, in pixels."""

    number: int  # lines per image
    length: int
    line_stride: int
    stride: int  # between positions

    @classmethod
    def of(cls, features: Tensor, rows: bool) -> "Lines":
        height, width = features.shape[2:]
        return cls(height, width, width, 1) if rows else cls(width, height, 1, width)


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


def attend_lines(
    keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend along every row or column.

    Args:
        keys: queries and keys, (N, D, H, W), channels last in memory, like all maps.
        values: (N, C, H, W).
        gate: factor per line and channel of the output, (N, lines, C), or None.
        rows: True to attend along rows, False to attend along columns.
        pool: whether to average the output over lines.

    Returns:
        The output (N, C, H, W); its mean over lines divided by L, (N, L, C), empty unless `pool`; and per query the
        maximum score and 1 / sum of exp(score - maximum), (2, N, lines, L), for the backward pass.
    """
    n, c = values.shape[:2]
    lines, out = Lines.of(values, rows), torch.empty_like(values)
    stats = values.new_empty(2, n, lines.number, lines.length, dtype=torch.float32)
    pooled = values.new_empty(n, lines.length, c if pool else 0)
    blocks = Blocks.of(lines, keys, values)
    args = (keys, values, gate, out, stats, *lines, c, keys.shape[1])
    sizes = {"gated": gate is not None, "block_d": blocks.key_channels}
    main = next_power_of_2(lines.length) // 2
    with on_device(values):
        if values.dtype != torch.float32 and 32 <= main <= MAX_SINGLE_BLOCK and lines.length - main <= TAIL:
            channels = min(max(next_power_of_2(c), 16), 128 if main <= 64 else 64)
            program_c = _channels_per_program(n * lines.number, c, channels)
            attention_with_tail_kernel[(n * lines.number, 1, ceil_div(c, program_c))](
                *args, **sizes, block=main, tail=TAIL, block_c=channels, program_c=program_c, num_warps=4
            )
        elif blocks.single:
            channels = 128 if blocks.positions <= 64 and blocks.channels == 64 and c > 64 else blocks.channels
            program_c = _channels_per_program(n * lines.number, c, channels)
            attention_kernel[(n * lines.number, 1, ceil_div(c, program_c))](
                *args, **sizes, single_block=True, block=blocks.positions, block_c=channels, program_c=program_c,
                num_warps=blocks.warps,
            )  # fmt: skip
        else:
            channels = blocks.channels
            grid = (n * lines.number, ceil_div(lines.length, blocks.positions), ceil_div(c, channels))
            attention_kernel[grid](
                *args, **sizes, single_block=False, block=blocks.positions, block_c=channels, program_c=channels,
                num_warps=blocks.warps, **SINGLE_STAGE,
            )  # fmt: skip
        if pool:
            channels = min(next_power_of_2(c), 512)
            pool_kernel[(n * lines.length, ceil_div(c, channels))](
                out, pooled, *lines, c, 1 / (lines.number * lines.length), block=4 if rows else 8, block_c=channels
            )
    return out, pooled, stats


def _channels_per_program(num_lines: int, channels: int, block: int) -> int:
    """Return all channels, so that weights are computed once per line, or fewer channels for more programs."""
    program_c = ceil_div(channels, block) * block
    while program_c % (2 * block) == 0 and num_lines * ceil_div(channels, program_c) < 512:
        program_c //= 2
    return program_c


@jit
def line_start(line: tl.tensor, num_lines: tl.tensor, length: tl.tensor, line_stride: tl.tensor) -> tl.tensor:
    """Return the first pixel of a line, counted over all images with `num_lines` lines each."""
    return (line // num_lines).to(tl.int64) * num_lines * length + (line % num_lines) * line_stride


@jit
def attention_scores(queries: tl.tensor, keys: tl.tensor, offs_k: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return the dot products of queries and keys, -inf for keys beyond the end of the line."""
    return tl.where((offs_k < length)[None, :], dot(queries, tl.trans(keys)), float("-inf"))


@jit
def load_gate(gate: tl.tensor, line: tl.tensor, offs_c: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Load the gate of a line as a float32 row (1, channels)."""
    return tl.load(gate + line * channels + offs_c, offs_c < channels, other=0.0).to(tl.float32)[None, :]


@jit
def attention_kernel(
    keys: tl.tensor,  # (pixels, D)
    values: tl.tensor,  # (pixels, C)
    gate: tl.tensor,  # (N * num_lines, C), if gated
    out: tl.tensor,  # (pixels, C)
    stats: tl.tensor,  # (2, N * num_lines, length) float32: max_score and inv_sum
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    gated: tl.constexpr,
    single_block: tl.constexpr,  # the line fits into one block
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    program_c: tl.constexpr,  # channels per program
) -> None:
    """Compute out = gate * softmax(scores) @ values along each line."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = line_start(line, num_lines, length, line_stride)
    offs_q = tl.program_id(1) * block + tl.arange(0, block)
    offs_d = tl.arange(0, block_d)
    queries = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)

    if single_block:
        offs_k = offs_q
        scores = attention_scores(queries, queries, offs_q, length)
        max_score = tl.max(scores, 1)
        exps = exp(scores - max_score[:, None], exact)
        inv_sum = reciprocal(tl.sum(exps, 1), exact)
        weights = (exps * inv_sum[:, None]).to(values.dtype.element_ty)
    else:
        max_score = tl.full([block], float("-inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        for block_start in range(0, length, block):
            offs_k = block_start + tl.arange(0, block)
            keys_block = load_tile(keys, start, offs_k, length, stride, offs_d, key_channels)
            scores = attention_scores(queries, keys_block, offs_k, length)
            new_max = tl.maximum(max_score, tl.max(scores, 1))
            total = total * exp(max_score - new_max, exact) + tl.sum(exp(scores - new_max[:, None], exact), 1)
            max_score = new_max
        inv_sum = reciprocal(total, exact)
    if tl.program_id(2) == 0:
        tl.store(stats + line * length + offs_q, max_score, offs_q < length)
        tl.store(stats + (tl.num_programs(0) + line) * length + offs_q, inv_sum, offs_q < length)

    for c in range(0, program_c, block_c):
        offs_c = tl.program_id(2) * program_c + c + tl.arange(0, block_c)
        if single_block:
            tile = load_tile(values, start, offs_k, length, stride, offs_c, channels)
            block_out = dot(weights, tile)
        else:
            block_out = tl.zeros([block, block_c], tl.float32)
            for block_start in range(0, length, block):
                offs_k = block_start + tl.arange(0, block)
                keys_block = load_tile(keys, start, offs_k, length, stride, offs_d, key_channels)
                scores = attention_scores(queries, keys_block, offs_k, length)
                weights = exp(scores - max_score[:, None], exact) * inv_sum[:, None]
                tile = load_tile(values, start, offs_k, length, stride, offs_c, channels)
                block_out = accumulate(block_out, dot(weights.to(tile.dtype), tile), length, exact)
        if gated:
            block_out *= load_gate(gate, line, offs_c, channels)
        store_tile(out, block_out, start, offs_q, length, stride, offs_c, channels)


@jit
def attention_with_tail_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    gated: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    block_c: tl.constexpr,
    program_c: tl.constexpr,
) -> None:
    """Compute `attention_kernel` for lines slightly longer than a power of two, such as 65 features of 513 pixels.

    A block of 128 would be half empty. Instead a line is one block and a short tail, and its weights have four parts.
    """
    line = tl.program_id(0)
    start = line_start(line, num_lines, length, line_stride)
    offs_d = tl.arange(0, block_d)
    offs_q, offs_t = tl.arange(0, block), block + tl.arange(0, tail)
    keys_block = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)
    keys_tail = load_tile(keys, start, offs_t, length, stride, offs_d, key_channels)
    dtype: tl.constexpr = values.dtype.element_ty

    to_block = attention_scores(keys_block, keys_block, offs_q, length)
    to_tail = attention_scores(keys_block, keys_tail, offs_t, length)
    max_score = tl.maximum(tl.max(to_block, 1), tl.max(to_tail, 1))
    to_block, to_tail = tl.exp(to_block - max_score[:, None]), tl.exp(to_tail - max_score[:, None])
    inv_sum = 1 / (tl.sum(to_block, 1) + tl.sum(to_tail, 1))
    block_block = (to_block * inv_sum[:, None]).to(dtype)
    block_tail = (to_tail * inv_sum[:, None]).to(dtype)

    from_block = attention_scores(keys_tail, keys_block, offs_q, length)
    from_tail = attention_scores(keys_tail, keys_tail, offs_t, length)
    tail_max = tl.maximum(tl.max(from_block, 1), tl.max(from_tail, 1))
    from_block, from_tail = tl.exp(from_block - tail_max[:, None]), tl.exp(from_tail - tail_max[:, None])
    tail_inv_sum = 1 / (tl.sum(from_block, 1) + tl.sum(from_tail, 1))
    tail_block = (from_block * tail_inv_sum[:, None]).to(dtype)
    tail_tail = (from_tail * tail_inv_sum[:, None]).to(dtype)

    if tl.program_id(2) == 0:
        inv_sums = stats + tl.num_programs(0) * length
        tl.store(stats + line * length + offs_q, max_score, offs_q < length)
        tl.store(inv_sums + line * length + offs_q, inv_sum, offs_q < length)
        tl.store(stats + line * length + offs_t, tail_max, offs_t < length)
        tl.store(inv_sums + line * length + offs_t, tail_inv_sum, offs_t < length)

    for c in range(0, program_c, block_c):
        offs_c = tl.program_id(2) * program_c + c + tl.arange(0, block_c)
        tile = load_tile(values, start, offs_q, length, stride, offs_c, channels)
        tail_values = load_tile(values, start, offs_t, length, stride, offs_c, channels)
        block_out = dot(block_block, tile) + dot(block_tail, tail_values)
        tail_out = dot(tail_block, tile) + dot(tail_tail, tail_values)
        if gated:
            factor = load_gate(gate, line, offs_c, channels)
            block_out *= factor
            tail_out *= factor
        store_tile(out, block_out, start, offs_q, length, stride, offs_c, channels)
        store_tile(out, tail_out, start, offs_t, length, stride, offs_c, channels)


@jit
def pool_kernel(
    features: tl.tensor,  # (pixels, C)
    pooled: tl.tensor,  # (N * length, C)
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    pool_scale: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Sum the lines of each image position by position, times `pool_scale`."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # reverse order: the data written last is still cached
    image, position = row // length, row % length
    start = image.to(tl.int64) * num_lines * length + position * stride
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    total = tl.zeros([block, block_c], tl.float32)
    for block_start in range(0, num_lines, block):
        offs_l = block_start + tl.arange(0, block)
        total += load_tile(features, start, offs_l, num_lines, line_stride, offs_c, channels).to(tl.float32)
    result = tl.sum(total, 0) * pool_scale
    tl.store(pooled + row * channels + offs_c, result.to(pooled.dtype.element_ty), offs_c < channels)
