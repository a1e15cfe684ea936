"""Triton kernels of a channel gate: all its layers, and the way back through them, in one launch each.

Nothing here is called but by `fused`.
"""

import triton.language as tl

from caaseg.attention.kernels import _exp, _inverse, _product, _put, _tile
from caaseg.attention.launching import Kernel, jit


@Kernel
def gate_kernel(
    pooled: tl.tensor,  # (positions, C)
    first: tl.tensor,  # (width, C)
    hidden: tl.tensor,  # (width, width) each
    last: tl.tensor,  # (C, width)
    gates: tl.tensor,  # (positions, C)
    states: tl.tensor,  # (layers + 1, positions, width): behind each layer but the last, where kept
    positions: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    slope: tl.tensor,
    layers: tl.constexpr,  # of `hidden`
    kept: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    block_w: tl.constexpr,
) -> None:
    """All layers of a channel gate for a block of positions; rounded between layers as the layers themselves do."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    units = tl.arange(0, block_w)
    state = tl.zeros([block, block_w], tl.float32)
    for c in range(0, depth, block_c):
        channels = c + tl.arange(0, block_c)
        tile = _tile(pooled, 0, at, positions, 1, channels, depth)
        state += _product(tile, tl.trans(_tile(first, 0, units, width, 1, channels, depth).to(tile.dtype)))
    narrow = _activated(state, slope, pooled)
    if kept:
        _put(states, narrow, 0, at, positions, 1, units, width)
    for layer in tl.static_range(layers):
        weights = _tile(hidden[layer], 0, units, width, 1, units, width).to(narrow.dtype)
        narrow = _activated(_product(narrow, tl.trans(weights)), slope, pooled)
        if kept:
            _put(states + (layer + 1) * positions * width, narrow, 0, at, positions, 1, units, width)
    for c in range(0, depth, block_c):
        channels = c + tl.arange(0, block_c)
        of_last = _tile(last, 0, channels, depth, 1, units, width).to(narrow.dtype)
        logits = _product(narrow, tl.trans(of_last)).to(narrow.dtype).to(tl.float32)
        power = _exp(-tl.abs(logits), narrow.dtype == tl.float32)
        sigmoid = tl.where(logits > 0, 1.0, power) * _inverse(1 + power, narrow.dtype == tl.float32)
        _put(gates, sigmoid, 0, at, positions, 1, channels, depth)


@jit
def _activated(state: tl.tensor, slope: tl.tensor, like: tl.tensor) -> tl.tensor:
    narrow = state.to(like.dtype.element_ty).to(tl.float32)
    return tl.where(narrow > 0, narrow, narrow * slope).to(like.dtype.element_ty)


@Kernel
def gate_backward_kernel(
    grad: tl.tensor,  # (positions, C), of gates
    gates: tl.tensor,  # (positions, C)
    states: tl.tensor,  # (layers + 1, positions, width)
    first: tl.tensor,
    hidden: tl.tensor,
    last: tl.tensor,
    grad_logits: tl.tensor,  # (positions, C)
    grad_states: tl.tensor,  # (layers + 1, positions, width), before the activations
    grad_pooled: tl.tensor,  # (positions, C)
    positions: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    slope: tl.tensor,
    layers: tl.constexpr,  # of `hidden`
    block: tl.constexpr,
    block_c: tl.constexpr,
    block_w: tl.constexpr,
) -> None:
    """The way back through a channel gate. Gradients of weights are products of what it gives."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    units = tl.arange(0, block_w)
    kind: tl.constexpr = grad.dtype.element_ty
    state = tl.zeros([block, block_w], tl.float32)
    for c in range(0, depth, block_c):
        channels = c + tl.arange(0, block_c)
        gate = _tile(gates, 0, at, positions, 1, channels, depth).to(tl.float32)
        incoming = _tile(grad, 0, at, positions, 1, channels, depth).to(tl.float32)
        of_logits = (incoming * gate * (1 - gate)).to(kind)
        _put(grad_logits, of_logits, 0, at, positions, 1, channels, depth)
        state += _product(of_logits, _tile(last, 0, channels, depth, 1, units, width).to(kind))
    for step in tl.static_range(layers + 1):
        skipped = (layers - step) * positions * width
        given = _tile(states + skipped, 0, at, positions, 1, units, width).to(tl.float32)
        narrow = tl.where(given > 0, state, state * slope).to(kind)
        _put(grad_states + skipped, narrow, 0, at, positions, 1, units, width)
        if step < layers:
            state = _product(narrow, _tile(hidden[layers - 1 - step], 0, units, width, 1, units, width).to(kind))
            state = state.to(kind).to(tl.float32)
    for c in range(0, depth, block_c):
        channels = c + tl.arange(0, block_c)
        of_first = _tile(first, 0, units, width, 1, channels, depth).to(kind)
        _put(grad_pooled, _product(narrow, of_first), 0, at, positions, 1, channels, depth)
