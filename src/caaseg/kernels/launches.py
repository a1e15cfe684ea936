"""Every launch of the fused form's kernels: how maps are cut for programs, and which kernel takes which lines.

Each function takes and gives tensors alone, so that it can be an operator.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caaseg.kernels import axial as kernels
from caaseg.kernels import axial_long as long_kernels
from caaseg.kernels import gate as gate_kernels

LONGEST = 128  # positions of which weights, and gradients of weights, still fit the registers
BLOCK = 64  # positions of a part of a longer line
TAIL = 16  # positions more than a power of two that are a part of their own
# For loops that make what their products read. Pipelined in two or three stages by Triton 3.6 on an H200, some such
# kernels gave other gradients of keys from run to run; none was seen to in one stage. Why is not proven.
IN_TURN = {"num_stages": 1}


class Lines(NamedTuple):
    """How the lines of a map lie among its pixels."""

    number: int  # of lines in an image
    length: int
    step_line: int  # in pixels
    step_position: int

    @classmethod
    def of(cls, features: Tensor, rows: bool) -> "Lines":
        height, width = features.shape[2:]
        return cls(height, width, width, 1) if rows else cls(width, height, 1, width)


class Blocks(NamedTuple):
    """How a line is cut for programs."""

    positions: int
    channels: int
    keys: int
    warps: int
    whole: bool  # one block holds a line

    @classmethod
    def of(cls, lines: Lines, keys: Tensor, values: Tensor) -> "Blocks":
        wide = values.dtype == torch.float32
        whole = lines.length <= (LONGEST // 4 if wide else LONGEST)
        positions = max(_power(lines.length), 16) if whole else (BLOCK // 2 if wide else BLOCK)
        channels = min(max(_power(values.shape[1]), 16), 32 if wide else 64)
        return cls(positions, channels, max(_power(keys.shape[1]), 16), 8 if positions > 64 else 4, whole)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def gather(keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gathered values (N, C, H, W), their pool over lines (N, L, C), and the softmax's sums (2, N, lines, L)."""
    n, c = values.shape[:2]
    lines, out = Lines.of(values, rows), torch.empty_like(values)
    sums = values.new_empty(2, n, lines.number, lines.length, dtype=torch.float32)
    blocks = Blocks.of(lines, keys, values)
    given = (keys, values, gate, out, sums, *lines, c, keys.shape[1])
    main = _power(lines.length) // 2
    flags = {"gated": gate is not None}
    if values.dtype != torch.float32 and 32 <= main <= LONGEST and lines.length - main <= TAIL:
        channels = min(max(_power(c), 16), 128 if main <= 64 else 64)
        span = _span(n * lines.number, c, channels)
        kernels.gather_with_tail_kernel[(n * lines.number, 1, _blocks(c, span))](
            *given, **flags, block_d=blocks.keys, block=main, tail=TAIL, block_c=channels, span=span,
            num_warps=4,
        )  # fmt: skip
    elif blocks.whole:
        channels = 128 if blocks.positions <= 64 and blocks.channels == 64 and c > 64 else blocks.channels
        span = _span(n * lines.number, c, channels)
        kernels.gather_kernel[(n * lines.number, 1, _blocks(c, span))](
            *given, **flags, one_block=True, block_d=blocks.keys, block=blocks.positions, block_c=channels, span=span,
            num_warps=blocks.warps,
        )  # fmt: skip
    else:
        channels = blocks.channels
        kernels.gather_kernel[(n * lines.number, _blocks(lines.length, blocks.positions), _blocks(c, channels))](
            *given, **flags, one_block=False, block_d=blocks.keys, block=blocks.positions, block_c=channels,
            span=channels, num_warps=blocks.warps, **IN_TURN,
        )  # fmt: skip
    pooled = values.new_empty(n, lines.length, c if pool else 0)
    if pool:
        channels = min(_power(c), 512)
        kernels.pool_kernel[(n * lines.length, _blocks(c, channels))](
            out, pooled, *lines, c, 1 / (lines.number * lines.length), block=4 if rows else 8, block_c=channels
        )
    return out, pooled, sums


def _span(lines: int, channels: int, block: int) -> int:
    """Channels of one program: all, so that weights are computed once, unless programs would be too few for a GPU."""
    span = _blocks(channels, block) * block
    while span % (2 * block) == 0 and lines * _blocks(channels, span) < 512:
        span //= 2
    return span


def gather_backward(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    sums: Tensor,
    grad: Tensor,
    grad_pooled: Tensor | None,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and gate (empty without one)."""
    n, c = values.shape[:2]
    d = keys.shape[1]
    lines = Lines.of(values, rows)
    blocks = Blocks.of(lines, keys, values)
    number = n * lines.number
    share = 1 / (lines.number * lines.length)
    grad_keys, grad_values = torch.empty_like(keys), torch.empty_like(values)
    flags = {"gated": gate is not None, "pooled": grad_pooled is not None}
    if blocks.whole:
        grad_gate = values.new_empty(n, lines.number, c if gate is not None else 0)
        kernels.gather_backward_kernel[(number,)](
            keys, values, gate, grad, grad_pooled, grad_keys, grad_values, grad_gate, *lines, c, d, share,
            **flags, block_d=blocks.keys, block=blocks.positions, block_c=blocks.channels, num_warps=blocks.warps,
            **IN_TURN,
        )  # fmt: skip
        return grad_keys, grad_values, grad_gate
    per_line = _blocks(lines.length, blocks.positions)
    deltas = torch.empty_like(sums[0])
    sizes = {"block_d": blocks.keys, "block": blocks.positions, "block_c": blocks.channels}
    sizes |= {"num_warps": blocks.warps, **IN_TURN}
    long_kernels.delta_kernel[(number, per_line)](
        keys, values, gate, sums, grad, grad_pooled, deltas, *lines, c, d, share, **flags, **sizes
    )
    parts = values.new_empty(n, lines.number, per_line, c if gate is not None else 0, dtype=torch.float32)
    long_kernels.values_backward_kernel[(number, per_line, _blocks(c, blocks.channels))](
        keys, values, gate, sums, grad, grad_pooled, grad_values, parts, *lines, c, d, share, **flags, **sizes
    )
    long_kernels.keys_backward_kernel[(number, per_line)](
        keys, values, gate, sums, deltas, grad, grad_pooled, grad_keys, *lines, c, d, share, **flags, **sizes
    )
    return grad_keys, grad_values, parts.sum(2).to(values.dtype)


def scale(features: Tensor, gate: Tensor) -> Tensor:
    """Features (N, C, H, W) times a gate of image columns (N, W, C)."""
    n, c, height, width = features.shape
    out, block = torch.empty_like(features), 2048
    kernels.scale_kernel[(n * height, _blocks(width * c, block))](features, gate, out, height, width * c, block=block)
    return out


def scale_backward(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of features and gate."""
    n, c, height, width = features.shape
    grad_features, grad_gate, block = torch.empty_like(features), torch.empty_like(gate), 512
    kernels.scale_backward_kernel[(n, _blocks(width * c, block))](
        features, gate, grad, grad_features, grad_gate, height, width * c, block_l=4, block=block
    )
    return grad_features, grad_gate


def gate(pooled: Tensor, weights: list[Tensor], slope: float, keep: bool) -> tuple[Tensor, Tensor]:
    """A channel gate, (N, L, C) -> (N, L, C), and what is behind each layer but the last, (layers, N * L, U)."""
    first, *hidden, last = weights
    n, length, c = pooled.shape
    gates, width = torch.empty_like(pooled), first.shape[0]
    states = pooled.new_empty(len(hidden) + 1 if keep else 0, n * length, width)
    gate_kernels.gate_kernel[(_blocks(n * length, 16),)](
        pooled, first, tuple(hidden), last, gates, states, n * length, c, width, slope,
        layers=len(hidden), kept=keep, **gate_blocks(c, width, pooled.dtype),
    )  # fmt: skip
    return gates, states


def gate_blocks(channels: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """How a gate's layers are cut for programs: a tile of weights and the next one fit a GPU's fast memory."""
    block_w = max(_power(width), 16)
    most = (16_384 if dtype == torch.float32 else 32_768) // block_w
    block_c = max(min(_power(channels), most), 16)
    return {"block": 16, "block_c": block_c, "block_w": block_w, "num_warps": 8, "num_stages": 2}


def gate_backward(
    grad: Tensor, pooled: Tensor, gates: Tensor, states: Tensor, weights: list[Tensor], slope: float
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of what was pooled, and of each layer's weights."""
    first, *hidden, last = weights
    n, length, c = pooled.shape
    width = first.shape[0]
    grad_logits, grad_states, grad_pooled = torch.empty_like(grad), torch.empty_like(states), torch.empty_like(pooled)
    gate_kernels.gate_backward_kernel[(_blocks(n * length, 16),)](
        grad, gates, states, first, tuple(hidden), last, grad_logits, grad_states, grad_pooled,
        n * length, c, width, slope,
        layers=len(hidden), **gate_blocks(c, width, pooled.dtype),
    )  # fmt: skip
    sizes = [weight.numel() for weight in weights]
    grads, tiles = first.new_empty(sum(sizes)), _blocks(max(c, width), 64)
    gate_kernels.gate_weights_kernel[(len(weights), tiles, tiles)](
        pooled, states, grad_logits, grad_states, grads, n * length, c, width, layers=len(hidden), block=64, block_p=64
    )
    parts = torch.split(grads, sizes)
    return grad_pooled, [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


def _blocks(length: int, block: int) -> int:
    return -(-length // block)
