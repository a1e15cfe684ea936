"""Triton kernels of the fused form: attention along lines, its gradient, and what gates need.

A map is channels last, pixel after pixel. A line is a column or a row: its position l is pixel
`start + l * step_position`, and the line beside it starts `step_line` pixels further. One program computes a block of
a line, so that no two programs add to one place: results are the same from run to run.

Attention weights are never stored. A block of them is exp(score - top) * scale, made again from the keys wherever it
is needed; scores are symmetric, because keys are the queries.

Nothing here is called but by `fused`.
"""

import triton.language as tl

from caaseg.kernels.launching import INTERPRETED, Kernel, jit

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
