"""Channel gates: Triton kernels and their launches.

`gate_mlp` runs all layers of a channel gate for pooled features in one launch. Its backward pass takes two launches.
`scale_columns` multiplies a map by the gate of its image columns.

Names: offs_p are positions of pooled features, offs_c are channels, and offs_w are units of a hidden layer.
"""

import torch
import triton.language as tl
from torch import Tensor

from caaseg.kernels.common import (
    accumulate,
    ceil_div,
    dot,
    exp,
    jit,
    load_tile,
    next_power_of_2,
    on_device,
    reciprocal,
    store_tile,
)

MAX_PROGRAMS = 132  # gate programs that run at the same time on a large GPU: one per multiprocessor


def gate_mlp(pooled: Tensor, weights: list[Tensor], slope: float, save_states: bool) -> tuple[Tensor, Tensor]:
    """Compute a channel gate: linear layers with leaky ReLU, then a sigmoid.

    Args:
        pooled: (N, L, C).
        weights: weights of the linear layers: first layer (U, C), hidden layers (U, U), last layer (C, U).
        slope: slope of the leaky ReLU below zero.
        save_states: whether to return the outputs of the hidden layers, for the backward pass.

    Returns:
        The gate (N, L, C), and the outputs of the hidden layers (hidden layers, N * L, U), empty unless `save_states`.
    """
    first, *hidden, last = weights
    n, length, c = pooled.shape
    gates, width = torch.empty_like(pooled), first.shape[0]
    states = pooled.new_empty(len(hidden) + 1 if save_states else 0, n * length, width)
    blocks, num_blocks = gate_blocks(c, width, pooled.dtype), ceil_div(n * length, 16)
    block_out = max(blocks["block_c"] // 2, 16)
    # Each program computes the hidden layers again, so channels are split only while all programs run at the same time.
    c_parts = max(min(ceil_div(c, block_out), MAX_PROGRAMS // max(num_blocks, 1)), 1)
    program_c = ceil_div(ceil_div(c, block_out), c_parts) * block_out
    with on_device(pooled):
        gate_kernel[(num_blocks, ceil_div(c, program_c))](
            pooled, first, tuple(hidden), last, gates, states, n * length, c, width, slope, layers=len(hidden),
            save_states=save_states, block_out=block_out, program_c=program_c, **blocks,
        )  # fmt: skip
    return gates, states


def gate_blocks(channels: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return block sizes for which two tiles of weights fit into shared memory."""
    block_w = max(next_power_of_2(width), 16)
    max_block_c = (16_384 if dtype == torch.float32 else 32_768) // block_w
    block_c = max(min(next_power_of_2(channels), max_block_c), 16)
    return {"block": 16, "block_c": block_c, "block_w": block_w, "num_warps": 8, "num_stages": 2}


def gate_mlp_backward(
    grad: Tensor, pooled: Tensor, gates: Tensor, states: Tensor, weights: list[Tensor], slope: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of `pooled` and of each weight of `gate_mlp`."""
    first, *hidden, last = weights
    n, length, c = pooled.shape
    width, layers = first.shape[0], len(hidden)
    grad_logits, grad_states, grad_pooled = torch.empty_like(grad), torch.empty_like(states), torch.empty_like(pooled)
    sizes = [weight.numel() for weight in weights]
    grads, tiles = first.new_empty(sum(sizes)), ceil_div(max(c, width), 64)
    with on_device(pooled):
        gate_backward_kernel[(ceil_div(n * length, 16),)](
            grad, gates, states, first, tuple(hidden), last, grad_logits, grad_states, grad_pooled,
            n * length, c, width, slope, layers=layers, **gate_blocks(c, width, pooled.dtype),
        )  # fmt: skip
        gate_weights_kernel[(len(weights), tiles, tiles)](
            pooled, states, grad_logits, grad_states, grads, n * length, c, width, layers=layers, block=64, block_p=64
        )
    grad_weights = torch.split(grads, sizes)
    return grad_pooled, [part.view_as(weight) for part, weight in zip(grad_weights, weights, strict=True)]


def scale_columns(features: Tensor, gate: Tensor) -> Tensor:
    """Multiply features (N, C, H, W), channels last in memory, by a gate of image columns (N, W, C)."""
    n, c, height, width = features.shape
    out, block = torch.empty_like(features), 2048
    with on_device(features):
        scale_columns_kernel[(n * height, ceil_div(width * c, block))](
            features, gate, out, height, width * c, block=block
        )
    return out


def scale_columns_backward(features: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of features and gate of `scale_columns`."""
    n, c, height, width = features.shape
    grad_features, grad_gate, block = torch.empty_like(features), torch.empty_like(gate), 512
    with on_device(features):
        scale_columns_backward_kernel[(n, ceil_div(width * c, block))](
            features, gate, grad, grad_features, grad_gate, height, width * c, block_h=4, block=block
        )
    return grad_features, grad_gate


@jit
def gate_kernel(
    pooled: tl.tensor,  # (num_positions, C)
    first: tl.tensor,  # (width, C)
    hidden: tl.tensor,  # tuple of (width, width)
    last: tl.tensor,  # (C, width)
    gates: tl.tensor,  # (num_positions, C)
    states: tl.tensor,  # (layers + 1, num_positions, width), outputs of the hidden layers if save_states
    num_positions: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    slope: tl.tensor,
    layers: tl.constexpr,  # length of `hidden`
    save_states: tl.constexpr,
    block: tl.constexpr,
    block_c: tl.constexpr,
    block_w: tl.constexpr,
    block_out: tl.constexpr,  # channels per block of the last layer
    program_c: tl.constexpr,  # output channels of the last layer per program
) -> None:
    """Compute all layers of a channel gate for a block of positions, rounding between layers as torch does.

    Few programs run, and each computes one layer after another, so memory latency dominates. Therefore, the weights of
    each layer are loaded before the previous layer is computed.
    """
    offs_p = tl.program_id(0) * block + tl.arange(0, block)
    offs_w = tl.arange(0, block_w)
    offs_out = tl.program_id(1) * program_c + tl.arange(0, block_out)
    if layers > 0:
        weights = load_tile(hidden[0], 0, offs_w, width, 1, offs_w, width)
    else:
        weights = load_tile(last, 0, offs_out, channels, 1, offs_w, width)
    state = tl.zeros([block, block_w], tl.float32)
    for c in range(0, channels, block_c):
        offs_c = c + tl.arange(0, block_c)
        tile = load_tile(pooled, 0, offs_p, num_positions, 1, offs_c, channels)
        state += dot(tile, tl.trans(load_tile(first, 0, offs_w, width, 1, offs_c, channels).to(tile.dtype)))
    state = leaky_relu(state, slope, pooled)
    if save_states and tl.program_id(1) == 0:
        store_tile(states, state, 0, offs_p, num_positions, 1, offs_w, width)
    for layer in tl.static_range(layers):
        if layer + 1 < layers:
            next_weights = load_tile(hidden[layer + 1], 0, offs_w, width, 1, offs_w, width)
        else:
            next_weights = load_tile(last, 0, offs_out, channels, 1, offs_w, width)
        state = leaky_relu(dot(state, tl.trans(weights.to(state.dtype))), slope, pooled)
        weights = next_weights
        if save_states and tl.program_id(1) == 0:
            store_tile(states + (layer + 1) * num_positions * width, state, 0, offs_p, num_positions, 1, offs_w, width)
    for c in tl.static_range(0, program_c, block_out):
        if c > 0:
            offs_out = tl.program_id(1) * program_c + c + tl.arange(0, block_out)
            weights = load_tile(last, 0, offs_out, channels, 1, offs_w, width)
        logits = dot(state, tl.trans(weights.to(state.dtype))).to(state.dtype).to(tl.float32)
        exp_logits = exp(-tl.abs(logits), state.dtype == tl.float32)
        sigmoid = tl.where(logits > 0, 1.0, exp_logits) * reciprocal(1 + exp_logits, state.dtype == tl.float32)
        store_tile(gates, sigmoid, 0, offs_p, num_positions, 1, offs_out, channels)


@jit
def leaky_relu(state: tl.tensor, slope: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round `state` to the dtype of the pointer `like`, apply leaky ReLU, and round again."""
    state = state.to(like.dtype.element_ty).to(tl.float32)
    return tl.where(state > 0, state, state * slope).to(like.dtype.element_ty)


@jit
def gate_backward_kernel(
    grad: tl.tensor,  # (num_positions, C), gradient of the gates
    gates: tl.tensor,  # (num_positions, C)
    states: tl.tensor,  # (layers + 1, num_positions, width)
    first: tl.tensor,
    hidden: tl.tensor,
    last: tl.tensor,
    grad_logits: tl.tensor,  # (num_positions, C)
    grad_states: tl.tensor,  # (layers + 1, num_positions, width), of the inputs of the activations
    grad_pooled: tl.tensor,  # (num_positions, C)
    num_positions: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    slope: tl.tensor,
    layers: tl.constexpr,  # length of `hidden`
    block: tl.constexpr,
    block_c: tl.constexpr,
    block_w: tl.constexpr,
) -> None:
    """Compute the gradients of the pooled features, the logits and the hidden layers of a channel gate."""
    offs_p = tl.program_id(0) * block + tl.arange(0, block)
    offs_w = tl.arange(0, block_w)
    dtype: tl.constexpr = grad.dtype.element_ty
    total = tl.zeros([block, block_w], tl.float32)
    for c in range(0, channels, block_c):
        offs_c = c + tl.arange(0, block_c)
        gate = load_tile(gates, 0, offs_p, num_positions, 1, offs_c, channels).to(tl.float32)
        grad_gate = load_tile(grad, 0, offs_p, num_positions, 1, offs_c, channels).to(tl.float32)
        grad_logit = (grad_gate * gate * (1 - gate)).to(dtype)
        store_tile(grad_logits, grad_logit, 0, offs_p, num_positions, 1, offs_c, channels)
        total += dot(grad_logit, load_tile(last, 0, offs_c, channels, 1, offs_w, width).to(dtype))
    for step in tl.static_range(layers + 1):
        offset = (layers - step) * num_positions * width
        output = load_tile(states + offset, 0, offs_p, num_positions, 1, offs_w, width).to(tl.float32)
        grad_state = tl.where(output > 0, total, total * slope).to(dtype)
        store_tile(grad_states + offset, grad_state, 0, offs_p, num_positions, 1, offs_w, width)
        if step < layers:
            total = dot(grad_state, load_tile(hidden[layers - 1 - step], 0, offs_w, width, 1, offs_w, width).to(dtype))
            total = total.to(dtype).to(tl.float32)
    for c in range(0, channels, block_c):
        offs_c = c + tl.arange(0, block_c)
        first_tile = load_tile(first, 0, offs_w, width, 1, offs_c, channels).to(dtype)
        store_tile(grad_pooled, dot(grad_state, first_tile), 0, offs_p, num_positions, 1, offs_c, channels)


@jit
def gate_weights_kernel(
    pooled: tl.tensor,  # (num_positions, C)
    states: tl.tensor,  # (layers + 1, num_positions, width)
    grad_logits: tl.tensor,  # (num_positions, C)
    grad_states: tl.tensor,  # (layers + 1, num_positions, width)
    grads: tl.tensor,  # gradients of all weights, concatenated: (width, C), (width, width) each, (C, width)
    num_positions: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    layers: tl.constexpr,  # length of `hidden`
    block: tl.constexpr,
    block_p: tl.constexpr,
) -> None:
    """Compute the weight gradients of a channel gate: per layer, (gradient of its output)^T @ inputs."""
    layer = tl.program_id(0)
    exact: tl.constexpr = pooled.dtype.element_ty == tl.float32
    grad_output, inputs = grad_states + layer * num_positions * width, states + (layer - 1) * num_positions * width
    rows, columns, offset = width, width, width * channels + (layer - 1) * width * width
    if layer == 0:
        inputs, columns, offset = pooled, channels, 0
    if layer == layers + 1:
        grad_output, rows = grad_logits, channels
    offs_row = tl.program_id(1) * block + tl.arange(0, block)
    offs_column = tl.program_id(2) * block + tl.arange(0, block)
    total = tl.zeros([block, block], tl.float32)
    for block_start in range(0, num_positions, block_p):
        offs_p = block_start + tl.arange(0, block_p)
        grad_tile = load_tile(grad_output, 0, offs_p, num_positions, 1, offs_row, rows)
        input_tile = load_tile(inputs, 0, offs_p, num_positions, 1, offs_column, columns)
        total = accumulate(total, dot(tl.trans(grad_tile), input_tile), num_positions, exact)
    store_tile(grads + offset, total, 0, offs_row, rows, 1, offs_column, columns)


@jit
def scale_columns_kernel(
    features: tl.tensor,  # (N, height, size), size = width * C
    gate: tl.tensor,  # (N, size)
    out: tl.tensor,
    height: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Multiply each image row by the gate of its image."""
    row = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    start = row.to(tl.int64) * size
    gate_tile = tl.load(gate + (row // height) * size + offs, offs < size, other=0.0).to(tl.float32)
    scaled = tl.load(features + start + offs, offs < size, other=0.0).to(tl.float32) * gate_tile
    tl.store(out + start + offs, scaled.to(out.dtype.element_ty), offs < size)


@jit
def scale_columns_backward_kernel(
    features: tl.tensor,  # (N, height, size)
    gate: tl.tensor,  # (N, size)
    grad: tl.tensor,  # (N, height, size)
    grad_features: tl.tensor,
    grad_gate: tl.tensor,  # (N, size)
    height: tl.tensor,
    size: tl.tensor,
    block_h: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute both gradients of `scale_columns_kernel`, reading the incoming gradient once."""
    image = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    gate_tile = tl.load(gate + image * size + offs, offs < size, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([block_h, block], tl.float32)
    start = image.to(tl.int64) * height
    for row_start in range(0, height, block_h):
        row = row_start + tl.arange(0, block_h)
        grad_tile = load_tile(grad, start, row, height, 1, offs, size).to(tl.float32)
        total += grad_tile * load_tile(features, start, row, height, 1, offs, size).to(tl.float32)
        store_tile(grad_features, grad_tile * gate_tile, start, row, height, 1, offs, size)
    tl.store(grad_gate + image * size + offs, tl.sum(total, 0).to(grad_gate.dtype.element_ty), offs < size)
