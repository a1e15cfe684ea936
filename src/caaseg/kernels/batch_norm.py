"""Triton kernels of `normalization`. A map is (rows, C): pixel after pixel, channels last.

One program sums some rows of some channels into a place of its own, and a second kernel adds these places up: results
are the same from run to run. What a kernel wrote last the next one reads first, from the cache.
"""

import triton.language as tl

from caaseg.kernels.launching import Kernel, jit


@jit
def _tile(pointer: tl.tensor, row: tl.tensor, rows: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Some rows by some channels, zeros beyond the ends."""
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    return tl.load(pointer + row.to(tl.int64)[:, None] * channels + channel[None, :], inside, other=0.0).to(tl.float32)


@jit
def _put(
    pointer: tl.tensor, tile: tl.tensor, row: tl.tensor, rows: tl.tensor, channel: tl.tensor, channels: tl.tensor
) -> None:
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    where = pointer + row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(where, tile.to(pointer.dtype.element_ty), inside)


@jit
def _of(pointer: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Numbers of some channels."""
    return tl.load(pointer + channel, channel < channels, other=0.0).to(tl.float32)


@Kernel
def moments_kernel(
    given: tl.tensor,  # (rows, C)
    parts: tl.tensor,  # (2, programs, C) float32: the mean of these rows, and the sum of squares around it
    rows: tl.tensor,
    channels: tl.tensor,
    share: tl.tensor,  # rows of one program
    block: tl.constexpr,
    block_c: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    """Mean and squares of some rows, taken from x - x0, x0 their first: large sums of near numbers would cancel."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    shift = _of(given + (part * share).to(tl.int64) * channels, channel, channels)[None, :]
    total = tl.zeros([block, block_c], tl.float32)
    squares = tl.zeros([block, block_c], tl.float32)
    # Several tiles are asked for before the first is there.
    for first in tl.range(part * share, tl.minimum((part + 1) * share, rows), block, loop_unroll_factor=unroll):
        row = first + tl.arange(0, block)
        tile = tl.where((row < rows)[:, None], _tile(given, row, rows, channel, channels) - shift, 0.0)
        total += tile
        squares += tile * tile
    own = tl.minimum(share, rows - part * share)
    offset = tl.sum(total, 0) / own
    where = parts + part * channels + channel
    tl.store(where, _of(given + (part * share).to(tl.int64) * channels, channel, channels) + offset, channel < channels)
    around = tl.sum(squares, 0) - offset * offset * own
    tl.store(where + tl.num_programs(0) * channels, around, channel < channels)


@jit
def _added_up(
    parts: tl.tensor,
    number: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros([block, block_c], tl.float32)
    for first in range(0, number, block):
        total += _tile(parts, first + tl.arange(0, block), number, channel, channels)
    return tl.sum(total, 0)


@Kernel
def moments_end_kernel(
    parts: tl.tensor,
    moments: tl.tensor,  # (2, C) float32: mean, and 1 / deviation
    running_mean: tl.tensor,  # (C,), moved towards the mean
    running_var: tl.tensor,
    number: tl.tensor,  # of parts
    rows: tl.tensor,
    channels: tl.tensor,
    share: tl.tensor,
    momentum: tl.tensor,
    epsilon: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Mean and deviation of all parts together (Chan, Golub and LeVeque), and the running statistics."""
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    inside = channel < channels
    first_mean = _of(parts, channel, channels)[None, :]
    total = tl.zeros([block, block_c], tl.float32)
    for first in range(0, number, block):
        part = first + tl.arange(0, block)
        own = tl.minimum(share, rows - part * share).to(tl.float32)[:, None]
        total += tl.where(
            (part < number)[:, None], own * (_tile(parts, part, number, channel, channels) - first_mean), 0.0
        )
    mean = _of(parts, channel, channels) + tl.sum(total, 0) / rows
    around = tl.zeros([block, block_c], tl.float32)
    for first in range(0, number, block):
        part = first + tl.arange(0, block)
        own = tl.minimum(share, rows - part * share).to(tl.float32)[:, None]
        apart = _tile(parts, part, number, channel, channels) - mean[None, :]
        squares = _tile(parts + number * channels, part, number, channel, channels)
        around += tl.where((part < number)[:, None], squares + own * apart * apart, 0.0)
    # A maximum that lets what is not a number through: the loss is to show it.
    variance = tl.maximum(tl.sum(around, 0) / rows, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(moments + channel, mean, inside)
    tl.store(moments + channels + channel, tl.div_rn(1.0, tl.sqrt_rn(variance + epsilon)), inside)
    before_mean, before_var = _of(running_mean, channel, channels), _of(running_var, channel, channels)
    unbiased = variance * (rows / (rows - 1.0))
    after_mean = before_mean + momentum * (mean - before_mean)
    after_var = before_var + momentum * (unbiased - before_var)
    tl.store(running_mean + channel, after_mean.to(running_mean.dtype.element_ty), inside)
    tl.store(running_var + channel, after_var.to(running_var.dtype.element_ty), inside)


@jit
def _scales(
    moments: tl.tensor, weight: tl.tensor, bias: tl.tensor, channel: tl.tensor, channels: tl.tensor
) -> tl.tensor:
    """Mean, 1 / deviation, weight and bias of some channels: read before a loop that writes, which would read anew."""
    return (
        _of(moments, channel, channels)[None, :],
        _of(moments + channels, channel, channels)[None, :],
        _of(weight, channel, channels)[None, :],
        _of(bias, channel, channels)[None, :],
    )


@jit
def _bytes(signs: tl.tensor, row: tl.tensor, rows: tl.tensor, block_c: tl.constexpr) -> tl.tensor:
    """Where the bits of some rows by a block of channels are: what a program writes lies together."""
    first = tl.program_id(1) * rows.to(tl.int64)
    return signs + (first + row)[:, None] * (block_c // 8) + tl.arange(0, block_c // 8)[None, :]


@jit
def _put_signs(
    signs: tl.tensor, tile: tl.tensor, row: tl.tensor, rows: tl.tensor, block: tl.constexpr, block_c: tl.constexpr
) -> None:
    """A bit for each value that ReLU let through, eight channels to a byte; what is no number is let through."""
    bits = tl.where(tile <= 0, 0, 1).reshape([block, block_c // 8, 8]) << tl.arange(0, 8)[None, None, :]
    tl.store(_bytes(signs, row, rows, block_c), tl.sum(bits, 2).to(tl.uint8), (row < rows)[:, None])


@jit
def _signs(signs: tl.tensor, row: tl.tensor, rows: tl.tensor, block: tl.constexpr, block_c: tl.constexpr) -> tl.tensor:
    """Those bits, of some rows by some channels."""
    bits = tl.load(_bytes(signs, row, rows, block_c), (row < rows)[:, None], other=0).to(tl.int32)
    return (bits[:, :, None] >> tl.arange(0, 8)[None, None, :] & 1).reshape([block, block_c])


@Kernel
def normalize_kernel(
    given: tl.tensor,  # (rows, C)
    added: tl.tensor,  # (rows, C), where summed
    moments: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,  # (rows, C)
    signs: tl.tensor,  # (blocks of channels, rows, block_c / 8) uint8, where summed and relu
    rows: tl.tensor,
    channels: tl.tensor,
    summed: tl.constexpr,
    relu: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    repeats: tl.constexpr,
) -> None:
    """The result: normalized, with what is added, behind ReLU."""
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mean, scale, factor, offset = _scales(moments, weight, bias, channel, channels)
    for step in range(repeats):
        row = (tl.program_id(0) * repeats + step) * block + tl.arange(0, block)
        tile = (_tile(given, row, rows, channel, channels) - mean) * scale * factor + offset
        if summed:
            tile += _tile(added, row, rows, channel, channels)
        if relu:
            tile = tl.maximum(tile, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's ReLU does
        _put(result, tile, row, rows, channel, channels)
        if summed and relu:
            _put_signs(signs, tile.to(result.dtype.element_ty), row, rows, block, block_c)


@Kernel
def sums_kernel(
    grad: tl.tensor,  # (rows, C), of the result
    other: tl.tensor,  # (rows, C), of the result too, where twice
    given: tl.tensor,
    signs: tl.tensor,  # as `normalize_kernel` wrote them
    moments: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    passed: tl.tensor,  # (rows, C): the gradient that ReLU lets through, where summed
    parts: tl.tensor,  # (2, programs, C) float32: sums of that gradient, and of its product with what was normalized
    rows: tl.tensor,
    channels: tl.tensor,
    share: tl.tensor,
    summed: tl.constexpr,
    twice: tl.constexpr,
    relu: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    """The sums of some rows that the gradients of weight, bias and features are made of."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mean, scale, factor, offset = _scales(moments, weight, bias, channel, channels)
    total = tl.zeros([block, block_c], tl.float32)
    products = tl.zeros([block, block_c], tl.float32)
    for first in tl.range(part * share, tl.minimum((part + 1) * share, rows), block, loop_unroll_factor=unroll):
        row = first + tl.arange(0, block)
        incoming = _tile(grad, row, rows, channel, channels)
        if twice:
            incoming += _tile(other, row, rows, channel, channels)
        standard = (_tile(given, row, rows, channel, channels) - mean) * scale
        if summed:
            incoming = tl.where(_signs(signs, row, rows, block, block_c) == 0, 0.0, incoming)
            _put(passed, incoming, row, rows, channel, channels)
        elif relu:  # without a sum the sign is known again
            incoming = tl.where(standard * factor + offset <= 0, 0.0, incoming)
        total += incoming
        products += incoming * standard
    where = parts + part * channels + channel
    tl.store(where, tl.sum(total, 0), channel < channels)
    tl.store(where + tl.num_programs(0) * channels, tl.sum(products, 0), channel < channels)


@Kernel
def sums_end_kernel(
    parts: tl.tensor,
    sums: tl.tensor,  # (2, C): gradients of bias and weight
    number: tl.tensor,
    channels: tl.tensor,
    block: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """The gradients of bias and weight, from the sums of all parts."""
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    for k in tl.static_range(2):
        total = _added_up(parts + k * number * channels, number, channel, channels, block, block_c)
        tl.store(sums + k * channels + channel, total, channel < channels)


@Kernel
def spread_kernel(
    grad: tl.tensor,  # (rows, C): of the result, or what ReLU let through where summed
    given: tl.tensor,
    moments: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,  # (2, C)
    grad_given: tl.tensor,  # (rows, C)
    rows: tl.tensor,
    channels: tl.tensor,
    masked: tl.constexpr,  # ReLU's mask is still to be applied
    block: tl.constexpr,
    block_c: tl.constexpr,
    repeats: tl.constexpr,
) -> None:
    """The gradient of what was normalized: less its own mean, and less its part along what was normalized."""
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mean, scale, factor, offset = _scales(moments, weight, bias, channel, channels)
    grad_mean = (_of(sums, channel, channels) / rows)[None, :]
    along = (_of(sums + channels, channel, channels) / rows)[None, :]
    for step in range(repeats):
        row = (tl.program_id(0) * repeats + step) * block + tl.arange(0, block)
        incoming = _tile(grad, row, rows, channel, channels)
        standard = (_tile(given, row, rows, channel, channels) - mean) * scale
        if masked:
            incoming = tl.where(standard * factor + offset <= 0, 0.0, incoming)
        _put(grad_given, factor * scale * (incoming - grad_mean - standard * along), row, rows, channel, channels)
