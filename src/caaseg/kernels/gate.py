"""Triton kernels of a channel gate: all its layers, and the way back through them, in few launches.

Nothing here is called but by `fused`.
"""

import triton.language as tl

from caaseg.kernels.axial import _added, _exp, _inverse, _product, _put, _tile
from caaseg.kernels.launching import Kernel, jit


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
    """The way back through a channel gate, to what was pooled and to what each layer gave."""
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


@Kernel
def gate_weights_kernel(
    pooled: tl.tensor,  # (positions, C)
    states: tl.tensor,  # (layers + 1, positions, width)
    grad_logits: tl.tensor,  # (positions, C)
    grad_states: tl.tensor,  # (layers + 1, positions, width)
    grads: tl.tensor,  # of the weights of all layers, one after the other: (width, C), (width, width) each, (C, width)
    positions: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    layers: tl.constexpr,  # between the first and the last
    block: tl.constexpr,
    block_p: tl.constexpr,
) -> None:
    """Gradients of the weights of a channel gate: for each layer, what it gave with what it was given."""
    layer = tl.program_id(0)
    exact: tl.constexpr = pooled.dtype.element_ty == tl.float32
    gave, given = grad_states + layer * positions * width, states + (layer - 1) * positions * width
    rows, columns, skipped = width, width, width * depth + (layer - 1) * width * width
    if layer == 0:
        given, columns, skipped = pooled, depth, 0
    if layer == layers + 1:
        gave, rows = grad_logits, depth
    row = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.program_id(2) * block + tl.arange(0, block)
    total = tl.zeros([block, block], tl.float32)
    for first in range(0, positions, block_p):
        at = first + tl.arange(0, block_p)
        left = _tile(gave, 0, at, positions, 1, row, rows)
        right = _tile(given, 0, at, positions, 1, column, columns)
        total = _added(total, _product(tl.trans(left), right), positions, exact)
    _put(grads + skipped, total, 0, row, rows, 1, column, columns)
