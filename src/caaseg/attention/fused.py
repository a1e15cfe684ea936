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
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from caaseg.attention.gate import ChannelGate, Gate, ask
from caaseg.kernels import launches, launching

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_KEY_CHANNELS = 256
FOR_SECOND = "use implementation='factorised'"
WIDEST_GATE = 512  # bytes of a row of a hidden layer's weights


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


# Launches as operators, for torch.compile to keep whole; it learns the shapes of what they give.


def _operator(name: str, launch: Callable[P, R], shapes: Callable[P, R]) -> Callable[P, R]:
    operator = torch.library.custom_op(f"caaseg::{name}", launch, mutates_args=())
    operator.register_fake(shapes)
    return operator


def _gather_shapes(
    keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (n, c), lines = values.shape[:2], launches.Lines.of(values, rows)
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
    (n, c), lines = values.shape[:2], launches.Lines.of(values, rows)
    grad_gate = values.new_empty(n, lines.number, c if gate is not None else 0)
    return torch.empty_like(keys), torch.empty_like(values), grad_gate


def _scale_backward_shapes(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(features), torch.empty_like(gate)


def _gate_shapes(pooled: Tensor, weights: list[Tensor], slope: float, keep: bool) -> tuple[Tensor, Tensor]:
    n, length, _ = pooled.shape
    states = pooled.new_empty(len(weights) - 1 if keep else 0, n * length, weights[0].shape[0])
    return torch.empty_like(pooled), states


_gather_operator = _operator("gather_lines", launches.gather, _gather_shapes)
_gather_backward_operator = _operator("gather_lines_backward", launches.gather_backward, _gather_backward_shapes)
_scale_operator = _operator("scale_columns", launches.scale, lambda features, gate: torch.empty_like(features))
_scale_backward_operator = _operator("scale_columns_backward", launches.scale_backward, _scale_backward_shapes)
_gate_operator = _operator("channel_gate", launches.gate, _gate_shapes)


# Gradients, shared by the plain calls and the operators.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return launches.gather(keys, values, gate, rows, pool)

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
        return _gather_gradients(launches.gather_backward, ctx, *grads)


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
        return launches.scale(features, gate)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        launching.refuse_second_derivatives(FOR_SECOND)
        return _scale_gradients(launches.scale_backward, ctx, grad)


def _scale_gradients(run: Callable[..., tuple[Tensor, Tensor]], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    features, gate = ctx.saved_tensors
    return run(features, gate, _channels_last(grad))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, slope: float, *weights: Tensor) -> Tensor:
        gates, states = launches.gate(pooled, list(weights), slope, True)
        ctx.slope = slope
        ctx.save_for_backward(pooled, gates, states, *weights)
        return gates

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        launching.refuse_second_derivatives(FOR_SECOND)
        pooled, gates, states, *weights = ctx.saved_tensors
        grad_pooled, grads = launches.gate_backward(grad.contiguous(), pooled, gates, states, weights, ctx.slope)
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
    return launches.gather(keys, values, gate, rows, pool)[:2]


def _scale(features: Tensor, gate: Tensor) -> Tensor:
    gate = gate.contiguous()
    if torch.compiler.is_compiling():
        return _scale_operator(features, gate)
    scaled: Tensor = (
        _Scale.apply(features, gate) if _learned(features, gate) else launches.scale(features, gate)  # type: ignore[no-untyped-call]
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
    return launches.gate(pooled, weights, gate.slope, False)[0]


def _plain(gate: Gate, dtype: torch.dtype) -> bool:
    """Whether a gate is the paper's own, with nothing hooked to it or changed, and fits a GPU's fast memory."""
    if type(gate) is not ChannelGate or _is_hooked(gate):
        return False
    if not all(type(layer) is nn.Linear and not _is_hooked(layer) for layer in (*gate.hidden, gate.last)):
        return False
    widest = max(dtype.itemsize, gate.last.weight.dtype.itemsize)  # weights are narrowed only behind that memory
    return gate.last.in_features <= WIDEST_GATE // widest


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _learned(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
