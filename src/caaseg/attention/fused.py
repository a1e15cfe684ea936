"""Channelized axial attention in GPU kernels: the factorised form, with maps that never leave their layout.

Both axes are one operation, attention along lines with its result pooled over the lines:

    columns   y, pooled over j      ->  column gate g_col
    rows      t = g_col * r, pooled over i, where r is plain row attention over y      ->  row gate g_row
    result    out = g_row * t

The column gate is constant along an image row, so the kernel of the rows multiplies it in as it writes.

Under torch.compile the same launches are custom operators. The gradients can not be differentiated again: second
derivatives are the factorised form's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from caaseg.attention import gate_kernels, kernels, launching, long_kernels
from caaseg.attention.gate import ChannelGate, Gate, ask

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_KEY_CHANNELS = 256
FOR_SECOND = "use implementation='factorised'"
LONGEST = 128  # positions of which weights, and gradients of weights, still fit the registers
BLOCK = 64  # positions of a part of a longer line
WIDEST_GATE = 512  # bytes of a row of a hidden layer's weights
TAIL = 16  # positions more than a power of two that are a part of their own
# For loops that make what their products read. Pipelined in two or three stages by Triton 3.6 on an H200, some such
# kernels gave other gradients of keys from run to run; none was seen to in one stage. Why is not proven.
IN_TURN = {"num_stages": 1}


def why_not(column_keys: Tensor, row_keys: Tensor, values: Tensor) -> str | None:
    """What keeps the kernels from computing this, in words; None where nothing does."""
    if not (values.is_cuda or launching.INTERPRETED):
        return f"the maps are on {values.device}; expected a GPU"
    if values.dtype not in DTYPES:
        return f"values are {values.dtype}; expected float16, bfloat16 or float32"
    if column_keys.dtype != values.dtype or row_keys.dtype != values.dtype:
        return f"keys are {column_keys.dtype} and {row_keys.dtype}; expected the dtype of values, {values.dtype}"
    widest = max(column_keys.shape[1], row_keys.shape[1])
    if widest > MOST_KEY_CHANNELS:
        return f"keys have {widest} channels; expected at most {MOST_KEY_CHANNELS}"
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is at work; expected plain tensors"
    return None


def fused_axial_attention(
    column_keys: Tensor, row_keys: Tensor, values: Tensor, column_gate: Gate | None, row_gate: Gate | None
) -> Tensor:
    """`channelized_axial_attention` where `why_not` has nothing to say; (N, C, H, W), channels last in memory."""
    column_keys, row_keys, values = _channels_last(column_keys), _channels_last(row_keys), _channels_last(values)
    y, pooled = _gather(column_keys, values, None, False, column_gate is not None)
    g_col = None if column_gate is None else _ask(column_gate, pooled, "column_gate")  # (N, H, C)
    t, pooled = _gather(row_keys, y, g_col, True, row_gate is not None)
    if row_gate is None:
        return t
    return _scale(t, _ask(row_gate, pooled, "row_gate"))


def _channels_last(features: Tensor) -> Tensor:
    return features.contiguous(memory_format=torch.channels_last)


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


# One launch after another; each takes and gives tensors alone, so that it can be an operator.


def _launch_gather(
    keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
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


def _launch_gather_backward(
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


def _launch_scale(features: Tensor, gate: Tensor) -> Tensor:
    """Features (N, C, H, W) times a gate of image columns (N, W, C)."""
    n, c, height, width = features.shape
    out, block = torch.empty_like(features), 2048
    kernels.scale_kernel[(n * height, _blocks(width * c, block))](features, gate, out, height, width * c, block=block)
    return out


def _launch_scale_backward(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    n, c, height, width = features.shape
    grad_features, grad_gate, block = torch.empty_like(features), torch.empty_like(gate), 512
    kernels.scale_backward_kernel[(n, _blocks(width * c, block))](
        features, gate, grad, grad_features, grad_gate, height, width * c, block_l=4, block=block
    )
    return grad_features, grad_gate


def _launch_gate(pooled: Tensor, weights: list[Tensor], slope: float, keep: bool) -> tuple[Tensor, Tensor]:
    """A channel gate, (N, L, C) -> (N, L, C), and what is behind each layer but the last, (layers, N * L, U)."""
    first, *hidden, last = weights
    n, length, c = pooled.shape
    gates, width = torch.empty_like(pooled), first.shape[0]
    states = pooled.new_empty(len(hidden) + 1 if keep else 0, n * length, width)
    gate_kernels.gate_kernel[(_blocks(n * length, 16),)](
        pooled, first, tuple(hidden), last, gates, states, n * length, c, width, slope,
        layers=len(hidden), kept=keep, **_gate_blocks(c, width, pooled.dtype),
    )  # fmt: skip
    return gates, states


def _gate_blocks(channels: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """How a gate's layers are cut for programs: a tile of weights and the next one fit a GPU's fast memory."""
    block_w = max(_power(width), 16)
    most = (16_384 if dtype == torch.float32 else 32_768) // block_w
    block_c = max(min(_power(channels), most), 16)
    return {"block": 16, "block_c": block_c, "block_w": block_w, "num_warps": 8, "num_stages": 2}


def _launch_gate_backward(
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
        layers=len(hidden), **_gate_blocks(c, width, pooled.dtype),
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


# The same as operators, for torch.compile to keep whole; it learns the shapes of what they give.


def _operator(name: str, launch: Callable[P, R], shapes: Callable[P, R]) -> Callable[P, R]:
    operator = torch.library.custom_op(f"caaseg::{name}", launch, mutates_args=())
    operator.register_fake(shapes)
    return operator


def _gather_shapes(
    keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (n, c), lines = values.shape[:2], Lines.of(values, rows)
    pooled = values.new_empty(n, lines.length, c if pool else 0)
    return (
        torch.empty_like(values),
        pooled,
        values.new_empty(2, n, lines.number, lines.length, dtype=torch.float32),
    )


def _gather_backward_shapes(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    sums: Tensor,
    grad: Tensor,
    grad_pooled: Tensor | None,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (n, c), lines = values.shape[:2], Lines.of(values, rows)
    grad_gate = values.new_empty(n, lines.number, c if gate is not None else 0)
    return torch.empty_like(keys), torch.empty_like(values), grad_gate


def _scale_backward_shapes(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(features), torch.empty_like(gate)


def _gate_shapes(pooled: Tensor, weights: list[Tensor], slope: float, keep: bool) -> tuple[Tensor, Tensor]:
    n, length, _ = pooled.shape
    states = pooled.new_empty(len(weights) - 1 if keep else 0, n * length, weights[0].shape[0])
    return torch.empty_like(pooled), states


_gather_operator = _operator("gather_lines", _launch_gather, _gather_shapes)
_gather_backward_operator = _operator("gather_lines_backward", _launch_gather_backward, _gather_backward_shapes)
_scale_operator = _operator("scale_columns", _launch_scale, lambda features, gate: torch.empty_like(features))
_scale_backward_operator = _operator("scale_columns_backward", _launch_scale_backward, _scale_backward_shapes)
_gate_operator = _operator("channel_gate", _launch_gate, _gate_shapes)


# Gradients, shared by the plain calls and the operators.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _launch_gather(keys, values, gate, rows, pool)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        keys, values, gate, ctx.rows, ctx.pool = inputs
        sums = output[2]
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(keys, values, gate, sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        launching.refuse_second_derivatives(FOR_SECOND)
        return _gather_gradients(_launch_gather_backward, ctx, *grads)


def _gather_gradients(
    run: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ctx: Any,
    grad: Tensor | None,
    grad_pooled: Tensor | None,
    _: Tensor | None,
) -> tuple[Tensor | None, ...]:
    keys, values, gate, sums = ctx.saved_tensors
    grad = torch.zeros_like(values) if grad is None else _channels_last(grad)
    if grad_pooled is not None:
        grad_pooled = grad_pooled.contiguous() if ctx.pool else None
    grad_keys, grad_values, grad_gate = run(keys, values, gate, sums, grad, grad_pooled, ctx.rows)
    return grad_keys, grad_values, None if gate is None else grad_gate, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(features: Tensor, gate: Tensor) -> Tensor:
        return _launch_scale(features, gate)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        launching.refuse_second_derivatives(FOR_SECOND)
        return _scale_gradients(_launch_scale_backward, ctx, grad)


def _scale_gradients(run: Callable[..., tuple[Tensor, Tensor]], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    features, gate = ctx.saved_tensors
    return run(features, gate, _channels_last(grad))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, slope: float, *weights: Tensor) -> Tensor:
        gates, states = _launch_gate(pooled, list(weights), slope, True)
        ctx.slope = slope
        ctx.save_for_backward(pooled, gates, states, *weights)
        return gates

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        launching.refuse_second_derivatives(FOR_SECOND)
        pooled, gates, states, *weights = ctx.saved_tensors
        grad_pooled, grads = _launch_gate_backward(grad.contiguous(), pooled, gates, states, weights, ctx.slope)
        return grad_pooled, None, *grads


# An operator's gradient is an operator again, whoever asks for it: not every tracer says that it is one.
_gather_operator.register_autograd(  # type: ignore[attr-defined]
    partial(_gather_gradients, _gather_backward_operator), setup_context=_Gather.setup_context
)
_scale_operator.register_autograd(  # type: ignore[attr-defined]
    partial(_scale_gradients, _scale_backward_operator), setup_context=_Scale.setup_context
)


def _gather(keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return _gather_operator(keys, values, gate, rows, pool)[:2]
    if _learned(keys, values, gate):
        out, pooled, _ = _Gather.apply(keys, values, gate, rows, pool)  # type: ignore[no-untyped-call]
        return out, pooled
    return _launch_gather(keys, values, gate, rows, pool)[:2]


def _scale(features: Tensor, gate: Tensor) -> Tensor:
    gate = gate.contiguous()
    if torch.compiler.is_compiling():
        return _scale_operator(features, gate)
    scaled: Tensor = (
        _Scale.apply(features, gate) if _learned(features, gate) else _launch_scale(features, gate)  # type: ignore[no-untyped-call]
    )
    return scaled


def _ask(gate: Gate, pooled: Tensor, name: str) -> Tensor:
    """The gate's answer; that of the paper's own gate from one launch."""
    if not _plain(gate, pooled.dtype):
        return ask(gate, pooled, name).contiguous()
    assert isinstance(gate, ChannelGate)
    weights = [layer.weight for layer in (*gate.hidden, gate.last) if isinstance(layer, nn.Linear)]
    as_they_are = all(weight.dtype == pooled.dtype for weight in weights)
    if not (as_they_are or torch.is_autocast_enabled(pooled.device.type)):
        return ask(gate, pooled, name)  # which says what is wrong
    if torch.compiler.is_compiling():  # which fuses the layers' activations itself where they are learned
        learning = torch.is_grad_enabled()
        return (
            ask(gate, pooled, name).contiguous() if learning else _gate_operator(pooled, weights, gate.slope, False)[0]
        )
    if _learned(pooled, *weights):
        answer: Tensor = _Gate.apply(pooled, gate.slope, *weights)  # type: ignore[no-untyped-call]
        return answer
    return _launch_gate(pooled, weights, gate.slope, False)[0]


def _plain(gate: Gate, dtype: torch.dtype) -> bool:
    """Whether a gate is the paper's own, with nothing hooked to it or changed, and fits a GPU's fast memory."""
    if type(gate) is not ChannelGate or _is_hooked(gate):
        return False
    if not all(type(layer) is nn.Linear and not _is_hooked(layer) for layer in (*gate.hidden, gate.last)):
        return False
    return gate.last.in_features <= WIDEST_GATE // dtype.itemsize


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _learned(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
