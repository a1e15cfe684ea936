"""Triton kernels of the fused form: attention along lines, its gradient, and what gates need.

A map is channels last, pixel after pixel. A line is a column or a row: its position l is pixel
`start + l * step_position`, and the line beside it starts `step_line` pixels further. One program computes a block of
a line, so that no two programs add to one place: results are the same from run to run.

Attention weights are never stored. A block of them is exp(score - top) * scale, made again from the keys wherever it
is needed; scores are symmetric, because keys are the queries.

Nothing here is called but by `fused`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run on the processor, step by step in Python: with TRITON_INTERPRET=1, for tests."""


def jit(function: Callable[..., Any]) -> Any:
    """Have Triton compile a function from its source. To Python its tensors and pointers have no types."""
    return triton.jit(function)


class Kernel:
    """A function that Triton compiles, launched straight once it was compiled for arguments of the same kinds.

    Triton looks at every argument of every launch anew, which may take longer than the kernel itself.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = jit(function)
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch on a grid. Constants are the kernel's, in its order, and Triton's own options."""
        if INTERPRETED:
            self.function[grid](*arguments, **constants)
            return
        key = (torch.cuda.current_device(), *constants.values(), *map(_kind, arguments))
        known = self._compiled.get(key)
        if known is None:
            own = tuple(value for name, value in constants.items() if name in self.function.arg_names)
            self._compiled[key] = self.function[grid](*arguments, **constants), own
        else:
            compiled, own = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *own)


def _kind(argument: Any) -> Any:
    """All that Triton makes a difference by; of whole numbers it is less than their value."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    return float if isinstance(argument, float) else argument


WIDEN = tl.constexpr(INTERPRETED)  # the interpreter takes the bits of a bfloat16 for a whole number in products


@jit
def _start(line: tl.tensor, lines: tl.tensor, length: tl.tensor, step_line: tl.tensor) -> tl.tensor:
    """The first pixel of a line, counted over all images: `lines` lines of `length` positions each."""
    return (line // lines).to(tl.int64) * lines * length + (line % lines) * step_line


@jit
def _tile(
    pointer: tl.tensor,
    start: tl.tensor,
    positions: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    channels: tl.tensor,
    number: tl.tensor,
) -> tl.tensor:
    """Some positions of a line by some channels of `number`; zeros beyond the ends."""
    inside = (positions < length)[:, None] & (channels < number)[None, :]
    return tl.load(pointer + start * number + positions[:, None] * step * number + channels[None, :], inside, other=0.0)


@jit
def _put(
    pointer: tl.tensor,
    tile: tl.tensor,
    start: tl.tensor,
    positions: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    channels: tl.tensor,
    number: tl.tensor,
) -> None:
    """Write what `_tile` reads."""
    inside = (positions < length)[:, None] & (channels < number)[None, :]
    where = pointer + start * number + positions[:, None] * step * number + channels[None, :]
    tl.store(where, tile.to(pointer.dtype.element_ty), inside)


@jit
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The matrix product in float32; of float32 numbers without rounding them first."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _wide_product(wide: tl.tensor, narrow: tl.tensor) -> tl.tensor:
    """The product of float32 numbers and others, which is not made of numbers as narrow as the others."""
    exact: tl.constexpr = narrow.dtype == tl.float32
    return tl.dot(wide, narrow.to(tl.float32), input_precision="ieee" if exact else "tf32x3")


@jit
def _added(total: tl.tensor, product: tl.tensor, length: tl.tensor, exact: tl.constexpr) -> tl.tensor:
    """A sum of products so far and one product more.

    The compiler would run one sum through all products, term by term; in float32 a product's own sum first rounds less.
    """
    if exact:
        product = tl.where(length > 0, product, 0.0)  # always so, which the compiler does not know
    return total + product


@jit
def _exp(exponent: tl.tensor, exact: tl.constexpr) -> tl.tensor:
    """The exponential of numbers up to 0. The GPU's own is several roundings off, which shows in float32 alone."""
    if exact:
        exponent = tl.maximum(exponent, -110.0)  # below it is 0
        whole = tl.floor(exponent * 1.4426950408889634 + 0.5)
        rest = tl.fma(whole, -0.693145751953125, exponent)  # ln 2 in two parts, the first short enough to be exact
        rest = tl.fma(whole, -1.428606765330187e-06, rest)
        series = tl.fma(rest, 1 / 5040, 1 / 720)
        series = tl.fma(rest, series, 1 / 120)
        series = tl.fma(rest, series, 1 / 24)
        series = tl.fma(rest, series, 1 / 6)
        series = tl.fma(rest, series, 0.5)
        series = tl.fma(rest, series, 1.0)
        return tl.fma(rest, series, 1.0) * tl.exp2(whole)
    return tl.exp(exponent)


@jit
def _inverse(number: tl.tensor, exact: tl.constexpr) -> tl.tensor:
    return tl.div_rn(1.0, number) if exact else 1 / number


@jit
def _sums(sums: tl.tensor, line: tl.tensor, at: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Highest score and scale of some positions of a line."""
    where = sums + line * length + at
    top = tl.load(where, at < length, other=0.0)
    return top, tl.load(where + tl.num_programs(0) * length, at < length, other=0.0)


@jit
def _scores(queries: tl.tensor, keys: tl.tensor, at_keys: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Dot products of positions, minus infinity beyond the end."""
    return tl.where((at_keys < length)[None, :], _product(queries, tl.trans(keys)), float("-inf"))


@Kernel
def gather_kernel(
    keys: tl.tensor,  # (pixels, D)
    values: tl.tensor,  # (pixels, C)
    gate: tl.tensor,  # (N * lines, C), where gated
    out: tl.tensor,  # (pixels, C)
    sums: tl.tensor,  # (2, N * lines, length) float32: the highest score, and 1 / sum of exp(score - highest)
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    key_depth: tl.tensor,
    gated: tl.constexpr,
    one_block: tl.constexpr,  # a line fits one block of keys
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    span: tl.constexpr,  # channels of one program
) -> None:
    """Gather along lines: out = gate * softmax(scores) @ values."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = _start(line, lines, length, step_line)
    at = tl.program_id(1) * block + tl.arange(0, block)
    of_key = tl.arange(0, block_d)
    queries = _tile(keys, start, at, length, step_position, of_key, key_depth)

    if one_block:
        at_keys = at
        scores = _scores(queries, queries, at, length)
        top = tl.max(scores, 1)
        powers = _exp(scores - top[:, None], exact)
        scale = _inverse(tl.sum(powers, 1), exact)
        weights = (powers * scale[:, None]).to(values.dtype.element_ty)
    else:
        top = tl.full([block], float("-inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        for first in range(0, length, block):
            at_keys = first + tl.arange(0, block)
            scores = _scores(
                queries, _tile(keys, start, at_keys, length, step_position, of_key, key_depth), at_keys, length
            )
            higher = tl.maximum(top, tl.max(scores, 1))
            total = total * _exp(top - higher, exact) + tl.sum(_exp(scores - higher[:, None], exact), 1)
            top = higher
        scale = _inverse(total, exact)
    if tl.program_id(2) == 0:
        tl.store(sums + line * length + at, top, at < length)
        tl.store(sums + (tl.num_programs(0) + line) * length + at, scale, at < length)

    for c in range(0, span, block_c):
        channels = tl.program_id(2) * span + c + tl.arange(0, block_c)
        if one_block:
            gathered = _product(weights, _tile(values, start, at_keys, length, step_position, channels, depth))
        else:
            gathered = tl.zeros([block, block_c], tl.float32)
            for first in range(0, length, block):
                at_keys = first + tl.arange(0, block)
                of_block = _tile(keys, start, at_keys, length, step_position, of_key, key_depth)
                weights = _exp(_scores(queries, of_block, at_keys, length) - top[:, None], exact) * scale[:, None]
                tile = _tile(values, start, at_keys, length, step_position, channels, depth)
                gathered = _added(gathered, _product(weights.to(tile.dtype), tile), length, exact)
        if gated:
            gathered *= tl.load(gate + line * depth + channels, channels < depth, other=0.0).to(tl.float32)[None, :]
        _put(out, gathered, start, at, length, step_position, channels, depth)


@Kernel
def gather_with_tail_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    key_depth: tl.tensor,
    gated: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    block_c: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """`gather_kernel` for lines a little longer than a power of two, such as the 65 features of 513 pixels.

    A block of 128 would be half empty. So a line is a block and a tail, and its weights are four parts.
    """
    line = tl.program_id(0)
    start = _start(line, lines, length, step_line)
    of_key = tl.arange(0, block_d)
    at, at_tail = tl.arange(0, block), block + tl.arange(0, tail)
    of_block = _tile(keys, start, at, length, step_position, of_key, key_depth)
    of_tail = _tile(keys, start, at_tail, length, step_position, of_key, key_depth)
    kind: tl.constexpr = values.dtype.element_ty

    to_block, to_tail = _scores(of_block, of_block, at, length), _scores(of_block, of_tail, at_tail, length)
    top = tl.maximum(tl.max(to_block, 1), tl.max(to_tail, 1))
    to_block, to_tail = tl.exp(to_block - top[:, None]), tl.exp(to_tail - top[:, None])
    scale = 1 / (tl.sum(to_block, 1) + tl.sum(to_tail, 1))
    block_block, block_tail = (to_block * scale[:, None]).to(kind), (to_tail * scale[:, None]).to(kind)

    from_block, from_tail = _scores(of_tail, of_block, at, length), _scores(of_tail, of_tail, at_tail, length)
    top_tail = tl.maximum(tl.max(from_block, 1), tl.max(from_tail, 1))
    from_block, from_tail = tl.exp(from_block - top_tail[:, None]), tl.exp(from_tail - top_tail[:, None])
    scale_tail = 1 / (tl.sum(from_block, 1) + tl.sum(from_tail, 1))
    tail_block, tail_tail = (from_block * scale_tail[:, None]).to(kind), (from_tail * scale_tail[:, None]).to(kind)

    if tl.program_id(2) == 0:
        other = sums + tl.num_programs(0) * length
        tl.store(sums + line * length + at, top, at < length)
        tl.store(other + line * length + at, scale, at < length)
        tl.store(sums + line * length + at_tail, top_tail, at_tail < length)
        tl.store(other + line * length + at_tail, scale_tail, at_tail < length)

    for c in range(0, span, block_c):
        channels = tl.program_id(2) * span + c + tl.arange(0, block_c)
        tile = _tile(values, start, at, length, step_position, channels, depth)
        tile_tail = _tile(values, start, at_tail, length, step_position, channels, depth)
        gathered = _product(block_block, tile) + _product(block_tail, tile_tail)
        gathered_tail = _product(tail_block, tile) + _product(tail_tail, tile_tail)
        if gated:
            factor = tl.load(gate + line * depth + channels, channels < depth, other=0.0).to(tl.float32)[None, :]
            gathered *= factor
            gathered_tail *= factor
        _put(out, gathered, start, at, length, step_position, channels, depth)
        _put(out, gathered_tail, start, at_tail, length, step_position, channels, depth)


@jit
def _incoming(
    grad: tl.tensor,
    grad_pooled: tl.tensor,
    image: tl.tensor,
    start: tl.tensor,
    at: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    channels: tl.tensor,
    depth: tl.tensor,
    share: tl.tensor,
    pooled: tl.constexpr,
) -> tl.tensor:
    """The gradient of gathered values: their own, and their part in what was pooled over all lines."""
    tile = _tile(grad, start, at, length, step, channels, depth)
    if pooled:
        spread = _tile(grad_pooled, image * length, at, length, 1, channels, depth)
        tile = (tile.to(tl.float32) + spread.to(tl.float32) * share).to(tile.dtype)
    return tile


@Kernel
def gather_backward_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    gate: tl.tensor,
    grad: tl.tensor,  # (pixels, C), of out
    grad_pooled: tl.tensor,  # (N * length, C), of the pooled out, where pooled
    grad_keys: tl.tensor,  # (pixels, D)
    grad_values: tl.tensor,  # (pixels, C)
    grad_gate: tl.tensor,  # (N * lines, C)
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    key_depth: tl.tensor,
    share: tl.tensor,  # of one value in its pooled sum
    gated: tl.constexpr,
    pooled: tl.constexpr,
    block_d: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """The whole gradient of a line that fits one block; every map is read and written once."""
    line = tl.program_id(0)
    exact: tl.constexpr = keys.dtype.element_ty == tl.float32
    start = _start(line, lines, length, step_line)
    at = tl.arange(0, block)
    of_key = tl.arange(0, block_d)
    of_line = _tile(keys, start, at, length, step_position, of_key, key_depth)
    scores = _scores(of_line, of_line, at, length)
    powers = _exp(scores - tl.max(scores, 1)[:, None], exact)
    weights = tl.where((at < length)[:, None], powers * _inverse(tl.sum(powers, 1), exact)[:, None], 0.0)
    narrow = tl.trans(weights.to(values.dtype.element_ty))

    grad_weights = tl.zeros([block, block], tl.float32)
    for c in range(0, depth, block_c):
        channels = c + tl.arange(0, block_c)
        incoming = _incoming(
            grad, grad_pooled, line // lines, start, at, length, step_position, channels, depth, share, pooled
        )
        tile = _tile(values, start, at, length, step_position, channels, depth)
        spread = _product(narrow, incoming)
        if gated:
            # The gate is one for the whole line: it leaves both sums, and its own gradient needs no gathered value.
            factor = tl.load(gate + line * depth + channels, channels < depth, other=0.0).to(tl.float32)[None, :]
            of_gate = tl.sum(spread * tile.to(tl.float32), 0)
            tl.store(grad_gate + line * depth + channels, of_gate.to(grad_gate.dtype.element_ty), channels < depth)
            spread *= factor
            incoming = (incoming.to(tl.float32) * factor).to(incoming.dtype)
        _put(grad_values, spread, start, at, length, step_position, channels, depth)
        grad_weights = _added(grad_weights, _product(incoming, tl.trans(tile)), length, exact)
    grad_scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None])
    both = grad_scores + tl.trans(grad_scores)  # as query and as key
    _put(grad_keys, _wide_product(both, of_line), start, at, length, step_position, of_key, key_depth)


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


@Kernel
def pool_kernel(
    features: tl.tensor,  # (pixels, C)
    pooled: tl.tensor,  # (N * length, C)
    lines: tl.tensor,
    length: tl.tensor,
    step_line: tl.tensor,
    step_position: tl.tensor,
    depth: tl.tensor,
    share: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """The sum over all lines of an image, position by position, times `share`."""
    spot = tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is read first, from the cache
    image, position = spot // length, spot % length
    start = image.to(tl.int64) * lines * length + position * step_position
    channels = tl.program_id(1) * block_c + tl.arange(0, block_c)
    total = tl.zeros([block, block_c], tl.float32)
    for first in range(0, lines, block):
        total += _tile(features, start, first + tl.arange(0, block), lines, step_line, channels, depth).to(tl.float32)
    result = tl.sum(total, 0) * share
    tl.store(pooled + spot * depth + channels, result.to(pooled.dtype.element_ty), channels < depth)


@Kernel
def scale_kernel(
    features: tl.tensor,  # (N, lines, size): a line's positions and channels lie one after the other
    gate: tl.tensor,  # (N, size)
    out: tl.tensor,
    lines: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Every line of an image times the image's gate."""
    line = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    start = line.to(tl.int64) * size
    factor = tl.load(gate + (line // lines) * size + at, at < size, other=0.0).to(tl.float32)
    scaled = tl.load(features + start + at, at < size, other=0.0).to(tl.float32) * factor
    tl.store(out + start + at, scaled.to(out.dtype.element_ty), at < size)


@Kernel
def scale_backward_kernel(
    features: tl.tensor,  # (N, lines, size)
    gate: tl.tensor,  # (N, size)
    grad: tl.tensor,  # (N, lines, size)
    grad_features: tl.tensor,
    grad_gate: tl.tensor,  # (N, size)
    lines: tl.tensor,
    size: tl.tensor,
    block_l: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Both gradients of `scale_kernel` while the incoming one is read once."""
    image = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    factor = tl.load(gate + image * size + at, at < size, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([block_l, block], tl.float32)
    start = image.to(tl.int64) * lines
    for first in range(0, lines, block_l):
        line = first + tl.arange(0, block_l)
        incoming = _tile(grad, start, line, lines, 1, at, size).to(tl.float32)
        total += incoming * _tile(features, start, line, lines, 1, at, size).to(tl.float32)
        _put(grad_features, incoming * factor, start, line, lines, 1, at, size)
    tl.store(grad_gate + image * size + at, tl.sum(total, 0).to(grad_gate.dtype.element_ty), at < size)
