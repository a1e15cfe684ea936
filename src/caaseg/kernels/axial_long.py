"""Triton kernels of the gradient of lines too long for one block: three passes over parts of a line.

What the softmax takes off comes first, then the values' gradient, then the keys'.

Nothing here is called but by `fused`.
"""

import triton.language as tl

from caaseg.kernels.axial import (
    _added,
    _exp,
    _incoming,
    _product,
    _put,
    _scores,
    _start,
    _sums,
    _tile,
    _wide_product,
)
from caaseg.kernels.launching import Kernel


@Kernel
def delta_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    sums: tl.tensor,
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    deltas: tl.tensor,  # (N * lines, length) float32
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    key_depth: tl.tensor,
    share: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Weights times their gradients, summed: what the softmax takes off every gradient of its weights."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = _start(line, lines, length, step_line)
    at = tl.program_id(1) * block + tl.arange(0, block)
    of_key = tl.arange(0, block_d)
    queries = _tile(keys, start, at, length, step_position, of_key, key_depth)
    top, scale = _sums(sums, line, at, length)
    delta = tl.zeros([block], tl.float32)
    for first in range(0, length, block):
        at_keys = first + tl.arange(0, block)
        grad_weights = tl.zeros([block, block], tl.float32)
        for c in range(0, depth, block_c):
            channels = c + tl.arange(0, block_c)
            incoming = _incoming(
                grad, grad_pooled, line // lines, start, at, length, step_position, channels, depth, share, pooled
            )
            if gated:
                factor = tl.load(gate + line * depth + channels, channels < depth, other=0.0).to(tl.float32)[None, :]
                incoming = (incoming.to(tl.float32) * factor).to(incoming.dtype)
            tile = _tile(values, start, at_keys, length, step_position, channels, depth)
            grad_weights = _added(grad_weights, _product(incoming, tl.trans(tile)), length, exact)
        of_block = _tile(keys, start, at_keys, length, step_position, of_key, key_depth)
        weights = _exp(_scores(queries, of_block, at_keys, length) - top[:, None], exact) * scale[:, None]
        delta += tl.sum(weights * grad_weights, 1)
    tl.store(deltas + line * length + at, delta, at < length)


@Kernel
def values_backward_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    sums: tl.tensor,
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    grad_values: tl.tensor,
    grad_gate: tl.tensor,  # (N * lines, blocks, C) float32: a part each block
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    key_depth: tl.tensor,
    share: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """The gradient of a block of a long line's values, and its part of the gate's."""
    line, part = tl.program_id(0), tl.program_id(1)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = _start(line, lines, length, step_line)
    at = part * block + tl.arange(0, block)
    of_key = tl.arange(0, block_d)
    channels = tl.program_id(2) * block_c + tl.arange(0, block_c)
    of_block = _tile(keys, start, at, length, step_position, of_key, key_depth)
    spread = tl.zeros([block, block_c], tl.float32)
    for first in range(0, length, block):
        at_queries = first + tl.arange(0, block)
        queries = _tile(keys, start, at_queries, length, step_position, of_key, key_depth)
        top, scale = _sums(sums, line, at_queries, length)
        # Transposed.
        weights = _exp(_scores(of_block, queries, at_queries, length) - top[None, :], exact) * scale[None, :]
        incoming = _incoming(
            grad, grad_pooled, line // lines, start, at_queries, length, step_position, channels, depth, share, pooled
        )
        spread = _added(spread, _product(weights.to(incoming.dtype), incoming), length, exact)
    if gated:
        tile = _tile(values, start, at, length, step_position, channels, depth)
        of_gate = tl.sum(tl.where((at < length)[:, None], spread * tile.to(tl.float32), 0.0), 0)
        tl.store(grad_gate + (line * tl.num_programs(1) + part) * depth + channels, of_gate, channels < depth)
        spread *= tl.load(gate + line * depth + channels, channels < depth, other=0.0).to(tl.float32)[None, :]
    _put(grad_values, spread, start, at, length, step_position, channels, depth)


@Kernel
def keys_backward_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    sums: tl.tensor,
    deltas: tl.tensor,
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    grad_keys: tl.tensor,
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    key_depth: tl.tensor,
    share: tl.tensor,
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """The gradient of a block of a long line's keys, as queries and as keys."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = _start(line, lines, length, step_line)
    at = tl.program_id(1) * block + tl.arange(0, block)
    of_key = tl.arange(0, block_d)
    of_block = _tile(keys, start, at, length, step_position, of_key, key_depth)
    top, scale = _sums(sums, line, at, length)
    delta = tl.load(deltas + line * length + at, at < length, other=0.0)
    result = tl.zeros([block, block_d], tl.float32)
    for first in range(0, length, block):
        at_others = first + tl.arange(0, block)
        others = _tile(keys, start, at_others, length, step_position, of_key, key_depth)
        as_query = tl.zeros([block, block], tl.float32)
        as_key = tl.zeros([block, block], tl.float32)
        for c in range(0, depth, block_c):
            channels = c + tl.arange(0, block_c)
            mine = _incoming(
                grad, grad_pooled, line // lines, start, at, length, step_position, channels, depth, share, pooled
            )
            theirs = _incoming(
                grad,
                grad_pooled,
                line // lines,
                start,
                at_others,
                length,
                step_position,
                channels,
                depth,
                share,
                pooled,
            )
            if gated:
                factor = tl.load(gate + line * depth + channels, channels < depth, other=0.0).to(tl.float32)[None, :]
                mine = (mine.to(tl.float32) * factor).to(mine.dtype)
                theirs = (theirs.to(tl.float32) * factor).to(theirs.dtype)
            of_others = tl.trans(_tile(values, start, at_others, length, step_position, channels, depth))
            as_query = _added(as_query, _product(mine, of_others), length, exact)
            mine = _tile(values, start, at, length, step_position, channels, depth)
            as_key = _added(as_key, _product(mine, tl.trans(theirs)), length, exact)
        inside = (at < length)[:, None] & (at_others < length)[None, :]
        scores = _product(of_block, tl.trans(others))
        other_top, other_scale = _sums(sums, line, at_others, length)
        other_delta = tl.load(deltas + line * length + at_others, at_others < length, other=0.0)
        towards = tl.where(inside, _exp(scores - top[:, None], exact) * scale[:, None], 0.0)
        back = tl.where(inside, _exp(scores - other_top[None, :], exact) * other_scale[None, :], 0.0)
        both = towards * (as_query - delta[:, None]) + back * (as_key - other_delta[None, :])
        result = _added(result, _wide_product(both, others), length, exact)
    _put(grad_keys, result, start, at, length, step_position, of_key, key_depth)
