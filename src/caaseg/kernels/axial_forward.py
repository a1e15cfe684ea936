"""Attention along the lines of a feature map, forward: Triton kernels and their launches.

A map is stored channels last, pixel by pixel. A line is an image column or row: its position l is pixel
`start + l * stride`, and the next line starts `line_stride` pixels further. No two programs write to the same address,
so results are deterministic.

Attention weights are never stored. Scores are symmetric, because keys and queries are the same. A short line fits into
one block: a program computes its weights once for all of its channels. A long line is computed block by block with an
online softmax. Lines are often slightly longer than a power of two: at output stride 8, 513 pixels give 65 features. A
block of 128 positions would be half empty, so such a line is split into a block of 64 positions and a tail of up to 16.

Names: offs_q, offs_k and offs_t are positions of queries, keys and the tail; offs_c are channels of values, offs_d
channels of keys.
"""

from typing import Any, NamedTuple

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
    shared_memory_per_program,
    store_tile,
)

MAX_SINGLE_BLOCK = 128  # longest line whose weights and weight gradients fit into registers
TAIL = 16  # positions of a tail
MIN_PROGRAMS = 256  # about two per multiprocessor of a large GPU
SPARE_SHARED_MEMORY = 8192  # bytes for reductions and changes of layout
LOG2_E = tl.constexpr(1.4426950408889634)


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
        The output (N, C, H, W); its mean over lines divided by L, (N, L, C), empty unless `pool`; and, for the backward
        pass, the maximum score and 1 / sum of exp(score - maximum) per query, (2, N, lines, L).
    """
    n, c = values.shape[:2]
    lines, out = Lines.of(values, rows), torch.empty_like(values)
    num_lines = n * lines.number
    stats = values.new_empty(2, n, lines.number, lines.length, dtype=torch.float32)
    pooled = values.new_empty(n, lines.length, c if pool else 0)
    args = (keys, values, gate, out, stats, *lines, c, keys.shape[1])
    options = {"gated": gate is not None, "block_d": max(next_power_of_2(keys.shape[1]), 16)}
    with on_device(values):
        if (blocks := tail_blocks(lines.length, c, values.dtype)) is not None:
            program_c = _channels_per_program(num_lines, c, blocks["block_c"])
            attention_with_tail_kernel[(num_lines, ceil_div(c, program_c))](
                *args, **options, **blocks, program_c=program_c
            )
        elif (blocks := single_blocks(lines.length, c, values.dtype)) is not None:
            program_c = _channels_per_program(num_lines, c, blocks["block_c"])
            attention_kernel[(num_lines, ceil_div(c, program_c))](*args, **options, **blocks, program_c=program_c)
        else:
            blocks = long_blocks(lines.length, c, options["block_d"], values.dtype, shared_memory_per_program(values))
            number = (lines.length - blocks["tail_q"], c)
            parts, c_parts = map(ceil_div, number, (blocks["block_q"], blocks["block_c"]))
            long_attention_kernel[(num_lines * parts * c_parts,)](*args, parts, c_parts, **options, **blocks)
        if pool:
            blocks = pool_blocks(n * lines.length, c)
            pool_kernel[(n * lines.length, ceil_div(c, blocks["block_c"]))](
                out, pooled, *lines, c, 1 / (lines.number * lines.length), **blocks
            )
    return out, pooled, stats


def tail_blocks(length: int, channels: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the block sizes of `attention_with_tail_kernel`, or None if a line is not one block and a short tail."""
    main = next_power_of_2(length) // 2
    if dtype == torch.float32 or not 32 <= main <= MAX_SINGLE_BLOCK or length - main > TAIL:
        return None
    block_c = min(max(next_power_of_2(channels), 16), 128 if main <= 64 else 64)
    blocks = {"block": main, "tail": TAIL, "block_c": block_c, "num_warps": 4}
    # With 128 registers per thread, four programs fit on a multiprocessor.
    return blocks | {"maxnreg": 128} if main == 32 and torch.version.hip is None else blocks


def single_blocks(length: int, channels: int, dtype: torch.dtype) -> dict[str, int] | None:
    """Return the block sizes of `attention_kernel`, or None if a line does not fit into one block."""
    float32 = dtype == torch.float32
    if length > (MAX_SINGLE_BLOCK // 4 if float32 else MAX_SINGLE_BLOCK):
        return None
    block = max(next_power_of_2(length), 16)
    max_block_c = 32 if float32 else 128 if block <= 64 else 64
    block_c = min(max(next_power_of_2(channels), 16), max_block_c)
    return {"block": block, "block_c": block_c, "num_warps": 8 if block > 64 else 4}


def long_blocks(length: int, channels: int, block_d: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Return the block sizes of `long_attention_kernel` for a GPU with some bytes of shared memory per program."""
    float32 = dtype == torch.float32
    block_q, block_k = (32, 32) if float32 else (128, 64)
    block_c, stages = 32, 1
    for wide_c, more_stages in () if float32 else ((256, 3), (256, 2), (128, 2), (64, 2)):
        tiles = block_q * block_d + more_stages * block_k * (block_d + wide_c)
        if tiles * dtype.itemsize + SPARE_SHARED_MEMORY <= shared_memory:
            block_c, stages = wide_c, more_stages
            break
    rest_q, rest_k = length % block_q, length % block_k
    return {
        "block_q": block_q,
        "tail_q": TAIL if 0 < rest_q <= TAIL and not float32 else 0,
        "block_k": block_k,
        "tail_k": max(next_power_of_2(rest_k), 16) if rest_k else 0,
        "block_c": min(max(next_power_of_2(channels), 16), block_c),
        "num_warps": 4 if float32 else 8,
        "num_stages": stages,
    }


def pool_blocks(num_positions: int, channels: int) -> dict[str, int]:
    """Return the block sizes of `pool_kernel`."""
    block_c = min(next_power_of_2(channels), 512 if num_positions > 512 else 128)
    return {"block": 8, "block_c": block_c}


def _channels_per_program(num_lines: int, channels: int, block: int) -> int:
    """Return all channels, so that weights are computed once per line, or fewer if there were too few programs."""
    program_c = ceil_div(channels, block) * block
    while program_c % (2 * block) == 0 and num_lines * ceil_div(channels, program_c) < MIN_PROGRAMS:
        program_c //= 2
    return program_c


@jit
def line_start(line: tl.tensor, num_lines: tl.tensor, length: tl.tensor, line_stride: tl.tensor) -> tl.tensor:
    """Return the first pixel of a line. Lines are numbered over all images, each with `num_lines` lines."""
    return (line // num_lines).to(tl.int64) * num_lines * length + (line % num_lines) * line_stride


@jit
def attention_scores(queries: tl.tensor, keys: tl.tensor, offs_k: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return the dot products of queries and keys; -inf for keys beyond the end of the line."""
    return tl.where((offs_k < length)[None, :], dot(queries, tl.trans(keys)), float("-inf"))


@jit
def load_gate(gate: tl.tensor, line: tl.tensor, offs_c: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Load the gate of a line as a float32 row (1, channels)."""
    return tl.load(gate + line * channels + offs_c, offs_c < channels, other=0.0).to(tl.float32)[None, :]


@jit
def store_stats(
    stats: tl.tensor,
    line: tl.tensor,
    all_lines: tl.tensor,
    offs_q: tl.tensor,
    length: tl.tensor,
    max_score: tl.tensor,
    inv_sum: tl.tensor,
) -> None:
    """Store the maximum score and 1 / sum of each query of a block."""
    tl.store(stats + line * length + offs_q, max_score, offs_q < length)
    tl.store(stats + (all_lines + line) * length + offs_q, inv_sum, offs_q < length)


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
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    program_c: tl.constexpr,  # channels per program
) -> None:
    """Compute out = gate * softmax(scores) @ values along each line. A line fits into one block."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = line_start(line, num_lines, length, line_stride)
    # The grid has two axes, so program_id(2) is 0, but the compiler does not know this. Without it, Triton 3.6 uses so
    # many registers that two programs do not fit on a multiprocessor of an H200.
    offs_q = tl.program_id(2) * block + tl.arange(0, block)
    line_keys = load_tile(keys, start, offs_q, length, stride, tl.arange(0, block_d), key_channels)
    scores = attention_scores(line_keys, line_keys, offs_q, length)
    max_score = tl.max(scores, 1)
    exps = exp(scores - max_score[:, None], exact)
    inv_sum = reciprocal(tl.sum(exps, 1), exact)
    weights = (exps * inv_sum[:, None]).to(values.dtype.element_ty)
    if tl.program_id(1) == 0:
        store_stats(stats, line, tl.num_programs(0), offs_q, length, max_score, inv_sum)
    for c in range(0, program_c, block_c):
        offs_c = tl.program_id(1) * program_c + c + tl.arange(0, block_c)
        block_out = dot(weights, load_tile(values, start, offs_q, length, stride, offs_c, channels))
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
    """Compute the same as `attention_kernel` for lines of one block and a short tail. The weights have four parts."""
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

    if tl.program_id(1) == 0:
        store_stats(stats, line, tl.num_programs(0), offs_q, length, max_score, inv_sum)
        store_stats(stats, line, tl.num_programs(0), offs_t, length, tail_max, tail_inv_sum)

    for c in range(0, program_c, block_c):
        offs_c = tl.program_id(1) * program_c + c + tl.arange(0, block_c)
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
def long_attention_kernel(
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
    parts: tl.tensor,  # blocks of queries per line; the last one includes the tail
    c_parts: tl.tensor,  # blocks of channels of values
    gated: tl.constexpr,
    block_d: tl.constexpr,
    block_q: tl.constexpr,
    tail_q: tl.constexpr,  # further queries in the last block, or 0
    block_k: tl.constexpr,
    tail_k: tl.constexpr,  # size of a smaller last block of keys; 0 if all blocks are full
    block_c: tl.constexpr,
) -> None:
    """Compute out = gate * softmax(scores) @ values for a block of queries of a line of any length."""
    all_lines = tl.num_programs(0) // (parts * c_parts)
    # The programs of a line are consecutive and run at about the same time: its values are read from memory once.
    line, part = tl.program_id(0) // (parts * c_parts), tl.program_id(0) // c_parts % parts
    c_part = tl.program_id(0) % c_parts
    if tail_q > 0 and part == parts - 1:
        attend_queries(
            keys, values, gate, out, stats, line, all_lines, part, c_part, num_lines, length, line_stride, stride,
            channels, key_channels, gated, block_d, block_q, tail_q, block_k, tail_k, block_c,
        )  # fmt: skip
    else:
        attend_queries(
            keys, values, gate, out, stats, line, all_lines, part, c_part, num_lines, length, line_stride, stride,
            channels, key_channels, gated, block_d, block_q, 0, block_k, tail_k, block_c,
        )  # fmt: skip


@jit
def attend_queries(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    line: tl.tensor,
    all_lines: tl.tensor,  # number of lines of all images
    part: tl.tensor,
    c_part: tl.tensor,
    num_lines: tl.tensor,
    length: tl.tensor,
    line_stride: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_channels: tl.tensor,
    gated: tl.constexpr,
    block_d: tl.constexpr,
    block_q: tl.constexpr,
    tail_q: tl.constexpr,
    block_k: tl.constexpr,
    tail_k: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Compute the output of a block of queries and its tail with an online softmax (Milakov and Gimelshein, 2018)."""
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = line_start(line, num_lines, length, line_stride)
    offs_c = c_part * block_c + tl.arange(0, block_c)
    offs_d = tl.arange(0, block_d)
    offs_q = part * block_q + tl.arange(0, block_q)
    queries = load_tile(keys, start, offs_q, length, stride, offs_d, key_channels)
    max_score = tl.full([block_q], float("-inf"), tl.float32)
    sums = tl.zeros([block_q], tl.float32)
    total = tl.zeros([block_q, block_c], tl.float32)
    if tail_q > 0:
        offs_t = (part + 1) * block_q + tl.arange(0, tail_q)
        tail_queries = load_tile(keys, start, offs_t, length, stride, offs_d, key_channels)
        tail_max = tl.full([tail_q], float("-inf"), tl.float32)
        tail_sums = tl.zeros([tail_q], tl.float32)
        tail_total = tl.zeros([tail_q, block_c], tl.float32)
    whole = length - length % block_k
    for block_start in range(0, whole, block_k):
        offs_k = block_start + tl.arange(0, block_k)
        keys_block = load_tile(keys, start, offs_k, length, stride, offs_d, key_channels)
        tile = load_tile(values, start, offs_k, length, stride, offs_c, channels)
        scores = dot(queries, tl.trans(keys_block))
        max_score, sums, total = add_keys(scores, tile, max_score, sums, total, length, exact)
        if tail_q > 0:
            tail_scores = dot(tail_queries, tl.trans(keys_block))
            tail_max, tail_sums, tail_total = add_keys(
                tail_scores, tile, tail_max, tail_sums, tail_total, length, exact
            )
    if tail_k > 0:
        offs_k = whole + tl.arange(0, tail_k)
        keys_block = load_tile(keys, start, offs_k, length, stride, offs_d, key_channels)
        tile = load_tile(values, start, offs_k, length, stride, offs_c, channels)
        scores = attention_scores(queries, keys_block, offs_k, length)
        max_score, sums, total = add_keys(scores, tile, max_score, sums, total, length, exact)
        if tail_q > 0:
            tail_scores = attention_scores(tail_queries, keys_block, offs_k, length)
            tail_max, tail_sums, tail_total = add_keys(
                tail_scores, tile, tail_max, tail_sums, tail_total, length, exact
            )
    inv_sum = reciprocal(sums, exact)
    total *= inv_sum[:, None]
    if gated:
        factor = load_gate(gate, line, offs_c, channels)
        total *= factor
    store_tile(out, total, start, offs_q, length, stride, offs_c, channels)
    if c_part == 0:
        store_stats(stats, line, all_lines, offs_q, length, max_score, inv_sum)
    if tail_q > 0:
        tail_inv_sum = 1 / tail_sums
        tail_total *= tail_inv_sum[:, None]
        if gated:
            tail_total *= factor
        store_tile(out, tail_total, start, offs_t, length, stride, offs_c, channels)
        if c_part == 0:
            store_stats(stats, line, all_lines, offs_t, length, tail_max, tail_inv_sum)


@jit
def add_keys(
    scores: tl.tensor,  # (queries, keys)
    tile: tl.tensor,  # (keys, channels): values
    max_score: tl.tensor,  # (queries)
    sums: tl.tensor,  # (queries): sum of exp(score - max_score)
    total: tl.tensor,  # (queries, channels): sum of exp(score - max_score) * value
    length: tl.tensor,
    exact: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of keys to the online softmax. Return the new `max_score`, `sums` and `total`."""
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    if exact:
        exps, shrink = exp(scores - new_max[:, None], exact), exp(max_score - new_max, exact)
    else:  # one multiply-add and one exponential per score
        shift = new_max * LOG2_E
        exps = tl.exp2(scores * LOG2_E - shift[:, None])
        shrink = tl.exp2((max_score - new_max) * LOG2_E)  # exactly 1 if the maximum has not changed
    total = accumulate(total * shrink[:, None], dot(exps.to(tile.dtype), tile), length, exact)
    return new_max, sums * shrink + tl.sum(exps, 1), total


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
    """Sum the features of all lines of an image per position, and multiply by `pool_scale`."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # in reverse order: the data written last is still cached
    image, position = row // length, row % length
    start = image.to(tl.int64) * num_lines * length + position * stride
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    total = tl.zeros([block, block_c], tl.float32)
    for block_start in range(0, num_lines, block):
        offs_l = block_start + tl.arange(0, block)
        total += load_tile(features, start, offs_l, num_lines, line_stride, offs_c, channels).to(tl.float32)
    result = tl.sum(total, 0) * pool_scale
    tl.store(pooled + row * channels + offs_c, result.to(pooled.dtype.element_ty), offs_c < channels)
