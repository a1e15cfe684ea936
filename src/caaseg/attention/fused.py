"""Channelized axial attention in fused GPU kernels: the factorised form, with all maps channels last.

Both axes are the same operation, attention along lines whose output is also pooled over the lines:

    columns   y, pooled over j                                                        ->  column gate g_col
    rows      t = g_col * r, pooled over i, where r is plain row attention over y     ->  row gate g_row
    output    out = g_row * t

The column gate is constant along an image row, so the row kernel multiplies with it when it writes its output.

Under torch.compile the launches are custom operators. Second derivatives are not supported; use the factorised form.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.library import custom_op

from caaseg.attention.gate import ChannelGate, Gate, apply_gate
from caaseg.kernels import DTYPES, HAS_TRITON, kernels_run

MAX_KEY_CHANNELS = 256
MAX_GATE_ROW_BYTES = 512  # bytes per row of a hidden layer's weights; wider layers do not fit into shared memory


def unsupported_reason(column_keys: Tensor, row_keys: Tensor, values: Tensor) -> str | None:
    """Return the reason why the fused kernels do not apply, or None."""
    # Some versions of torch set is_exporting() under torch.compile, too.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return "the model is being exported; expected an ordinary call"  # other runtimes lack our operators
    if not HAS_TRITON:
        return "the package triton is not installed; it comes with torch for GPUs"
    from caaseg.kernels import common

    if not (values.is_cuda or common.INTERPRETED):
        return f"the maps are on {values.device}; expected a GPU"
    if values.dtype not in DTYPES:
        return f"values are {values.dtype}; expected float16, bfloat16 or float32"
    if column_keys.dtype != values.dtype or row_keys.dtype != values.dtype:
        return f"keys are {column_keys.dtype} and {row_keys.dtype}; expected the dtype of values, {values.dtype}"
    key_channels = max(column_keys.shape[1], row_keys.shape[1])
    if key_channels > MAX_KEY_CHANNELS:
        return f"keys have {key_channels} channels; expected at most {MAX_KEY_CHANNELS}"
    # torch.func has no public function to query whether a transform is active.
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is active; expected plain tensors"
    if values.is_cuda and not torch.compiler.is_compiling() and not kernels_run(values.device):
        return f"Triton kernels do not run on {values.device}"
    return None


def fused_axial_attention(
    column_keys: Tensor, row_keys: Tensor, values: Tensor, column_gate: Gate | None, row_gate: Gate | None
) -> Tensor:
    """Compute `channelized_axial_attention` in fused kernels. Call it only if `unsupported_reason` returns None."""
    column_keys, row_keys, values = _channels_last(column_keys), _channels_last(row_keys), _channels_last(values)
    y, pooled = _attend(column_keys, values, None, False, column_gate is not None)
    g_col = None if column_gate is None else fused_gate(column_gate, pooled, "column_gate")  # (N, H, C)
    t, pooled = _attend(row_keys, y, g_col, True, row_gate is not None)
    if row_gate is None:
        return t
    return _scale(t, fused_gate(row_gate, pooled, "row_gate"))


def _channels_last(features: Tensor) -> Tensor:
    return features.contiguous(memory_format=torch.channels_last)


# Launches. The kernels are imported when called, because triton is optional.


def _attend_lines(
    keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from caaseg.kernels.axial_forward import attend_lines

    return attend_lines(keys, values, gate, rows, pool)


def _attend_lines_backward(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    stats: Tensor,
    grad: Tensor,
    grad_pooled: Tensor | None,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from caaseg.kernels.axial_backward import attend_lines_backward

    return attend_lines_backward(keys, values, gate, stats, grad, grad_pooled, rows)


def _scale_columns(features: Tensor, gate: Tensor) -> Tensor:
    from caaseg.kernels.gate import scale_columns

    return scale_columns(features, gate)


def _scale_columns_backward(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    from caaseg.kernels.gate import scale_columns_backward

    return scale_columns_backward(features, gate, grad)


def _gate_mlp(pooled: Tensor, weights: list[Tensor], slope: float, save_states: bool) -> tuple[Tensor, Tensor]:
    from caaseg.kernels.gate import gate_mlp

    return gate_mlp(pooled, weights, slope, save_states)


# The same launches as operators for torch.compile, with the shapes of their results.

_attend_lines_op = custom_op("caaseg::attend_lines", _attend_lines, mutates_args=())
_attend_lines_backward_op = custom_op("caaseg::attend_lines_backward", _attend_lines_backward, mutates_args=())
_scale_columns_op = custom_op("caaseg::scale_columns", _scale_columns, mutates_args=())
_scale_columns_backward_op = custom_op("caaseg::scale_columns_backward", _scale_columns_backward, mutates_args=())
_gate_mlp_op = custom_op("caaseg::gate_mlp", _gate_mlp, mutates_args=())


@_attend_lines_op.register_fake
def _(keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool) -> tuple[Tensor, Tensor, Tensor]:
    n, c, height, width = values.shape
    lines, length = (height, width) if rows else (width, height)
    pooled = values.new_empty(n, length, c if pool else 0)
    return torch.empty_like(values), pooled, values.new_empty(2, n, lines, length, dtype=torch.float32)


@_attend_lines_backward_op.register_fake
def _(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    stats: Tensor,
    grad: Tensor,
    grad_pooled: Tensor | None,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n, c = values.shape[:2]
    grad_gate = values.new_empty(n, stats.shape[2], c if gate is not None else 0)
    return torch.empty_like(keys), torch.empty_like(values), grad_gate


@_scale_columns_op.register_fake
def _(features: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(features)


@_scale_columns_backward_op.register_fake
def _(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(features), torch.empty_like(gate)


@_gate_mlp_op.register_fake
def _(pooled: Tensor, weights: list[Tensor], slope: float, save_states: bool) -> tuple[Tensor, Tensor]:
    n, length, _ = pooled.shape
    states = pooled.new_empty(len(weights) - 1 if save_states else 0, n * length, weights[0].shape[0])
    return torch.empty_like(pooled), states


# Gradients, shared by the eager functions and the operators.


class _AttendLines(torch.autograd.Function):
    @staticmethod
    def forward(
        keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _attend_lines(keys, values, gate, rows, pool)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        keys, values, gate, ctx.rows, ctx.pool = inputs
        stats = output[2]
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(keys, values, gate, stats)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _raise_if_double_backward()
        return _attend_lines_gradients(_attend_lines_backward, ctx, *grads)


def _attend_lines_gradients(
    launch: Any, ctx: Any, grad: Tensor | None, grad_pooled: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    keys, values, gate, stats = ctx.saved_tensors
    grad = torch.zeros_like(values) if grad is None else _channels_last(grad)
    if grad_pooled is not None:
        grad_pooled = grad_pooled.contiguous() if ctx.pool else None
    grad_keys, grad_values, grad_gate = launch(keys, values, gate, stats, grad, grad_pooled, ctx.rows)
    return grad_keys, grad_values, None if gate is None else grad_gate, None, None


class _ScaleColumns(torch.autograd.Function):
    @staticmethod
    def forward(features: Tensor, gate: Tensor) -> Tensor:
        return _scale_columns(features, gate)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _raise_if_double_backward()
        return _scale_columns_gradients(_scale_columns_backward, ctx, grad)


def _scale_columns_gradients(launch: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    features, gate = ctx.saved_tensors
    grads: tuple[Tensor, Tensor] = launch(features, gate, _channels_last(grad))
    return grads


class _GateMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, slope: float, *weights: Tensor) -> Tensor:
        gates, states = _gate_mlp(pooled, list(weights), slope, True)
        ctx.slope = slope
        ctx.save_for_backward(pooled, gates, states, *weights)
        return gates

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from caaseg.kernels.gate import gate_mlp_backward

        _raise_if_double_backward()
        pooled, gates, states, *weights = ctx.saved_tensors
        grad_pooled, grads = gate_mlp_backward(grad.contiguous(), pooled, gates, states, weights, ctx.slope)
        return grad_pooled, None, *grads


def _raise_if_double_backward() -> None:
    from caaseg.kernels.common import raise_if_double_backward

    raise_if_double_backward("use implementation='factorised'")


# The gradient of an operator is an operator as well: not every tracer sets is_compiling().
_attend_lines_op.register_autograd(
    partial(_attend_lines_gradients, _attend_lines_backward_op), setup_context=_AttendLines.setup_context
)
_scale_columns_op.register_autograd(
    partial(_scale_columns_gradients, _scale_columns_backward_op), setup_context=_ScaleColumns.setup_context
)


def _attend(keys: Tensor, values: Tensor, gate: Tensor | None, rows: bool, pool: bool) -> tuple[Tensor, Tensor]:
    launch: Any = _attend_lines
    if torch.compiler.is_compiling():
        launch = _attend_lines_op
    elif _needs_grad(keys, values, gate):
        launch = _AttendLines.apply
    out, pooled, _ = launch(keys, values, gate, rows, pool)
    return out, pooled


def _scale(features: Tensor, gate: Tensor) -> Tensor:
    launch: Any = _scale_columns
    if torch.compiler.is_compiling():
        launch = _scale_columns_op
    elif _needs_grad(features, gate):
        launch = _ScaleColumns.apply
    scaled: Tensor = launch(features, gate.contiguous())
    return scaled


def fused_gate(gate: Gate, pooled: Tensor, name: str) -> Tensor:
    """Apply a gate to pooled features, (N, L, C) -> (N, L, C); a plain `ChannelGate` takes one kernel launch."""
    if not _is_plain_gate(gate, pooled.dtype):
        return apply_gate(gate, pooled, name).contiguous()
    assert isinstance(gate, ChannelGate)
    weights = [layer.weight for layer in (*gate.hidden, gate.last) if isinstance(layer, nn.Linear)]
    same_dtype = all(weight.dtype == pooled.dtype for weight in weights)
    if not (same_dtype or torch.is_autocast_enabled(pooled.device.type)):
        return apply_gate(gate, pooled, name)  # raises torch's error
    launch: Any = _gate_mlp
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():  # torch.compile fuses the layers and their gradients itself
            return apply_gate(gate, pooled, name).contiguous()
        launch = _gate_mlp_op
    elif _needs_grad(pooled, *weights):
        gates: Tensor = _GateMLP.apply(pooled, gate.slope, *weights)  # type: ignore[no-untyped-call]
        return gates
    gates, _ = launch(pooled, weights, gate.slope, False)
    return gates


def _is_plain_gate(gate: Gate, dtype: torch.dtype) -> bool:
    """Return whether a gate is a `ChannelGate` without hooks or changed layers that fits into shared memory."""
    if type(gate) is not ChannelGate or _has_hooks(gate):
        return False
    if not all(type(layer) is nn.Linear and not _has_hooks(layer) for layer in (*gate.hidden, gate.last)):
        return False
    itemsize = max(dtype.itemsize, gate.last.weight.dtype.itemsize)  # weights are converted after they are loaded
    return gate.last.in_features <= MAX_GATE_ROW_BYTES // itemsize


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
