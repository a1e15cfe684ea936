"""Compile every kernel for an NVIDIA GPU of compute capability 9.0 and print the size of its binary.

Runs without a GPU, but in a process without TRITON_INTERPRET=1. First it prints the error for maps on the CPU, which
only the interpreter supports. The argument "small" compiles each kernel once, with small blocks; "used" compiles the
block sizes and dtypes that the library uses, which takes minutes.
"""

import inspect
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from caaseg.attention import channelized_axial_attention
from caaseg.attention.fused import MAX_GATE_ROW_BYTES
from caaseg.kernels import axial_backward, axial_forward, batch_norm, cross_entropy, gate, kernels_run, max_pool, resize

SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024}  # bytes per program, by compute capability
ALIGNED = ("channels", "key_channels")
INTEGERS = (
    "num_lines length line_stride stride channels key_channels size num_positions width height h w classes "
    "rows num_parts program_rows parts c_parts"
)
FLOATS = "pool_scale slope step_x step_y label_smoothing momentum eps"
FLOAT32_POINTERS = "stats deltas weights losses moments sums running_mean running_var weight bias"
TYPES: dict[str, Any] = {
    **dict.fromkeys(INTEGERS.split(), "i32"),
    **dict.fromkeys(FLOATS.split(), "fp32"),
    **dict.fromkeys(FLOAT32_POINTERS.split(), "*fp32"),
    "mask": "*u8",
    "labels": "*u8",
    "positions": "*u8",
}


def print_error_on_cpu() -> None:
    assert not kernels_run(torch.device("cpu"))  # Triton fails without a driver
    maps = torch.zeros(1, 4, 2, 3)
    try:
        channelized_axial_attention(maps, maps, maps, None, None, implementation="fused")
    except ValueError as error:
        print(error)


def compile_kernel(
    kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3, capability: int = 90, **types: Any
) -> None:
    """Compile a kernel; arguments that have no type in `types` or `TYPES` are pointers to bfloat16."""
    names = list(inspect.signature(kernel.fn).parameters)
    known = {**TYPES, **types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: known.get(name, "*bf16") for name in names}
    # Pointers and numbers of channels are multiples of 16, as in most calls: only then are loads pipelined.
    aligned = [name for name in names if str(signature[name]).startswith("*") or name in ALIGNED]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants},
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    if kernel.__name__ in ("normalize_kernel", "merge_moments_kernel"):
        assert "max.NaN.f32" in compiled.asm["ptx"]  # NaN propagates; the interpreter's maximum always does that
    print(kernel.__name__, len(compiled.asm["cubin"]))


def compile_small_blocks() -> None:
    blocks = {"block": 16, "block_d": 16, "block_c": 16, "gated": True}
    compile_kernel(axial_forward.attention_kernel, {**blocks, "program_c": 16})
    compile_kernel(axial_forward.attention_with_tail_kernel, {**blocks, "tail": 16, "program_c": 16})
    long = {"block_q": 16, "tail_q": 16, "block_k": 16, "tail_k": 16, "block_d": 16, "block_c": 16, "gated": True}
    compile_kernel(axial_forward.long_attention_kernel, long)
    compile_kernel(axial_forward.pool_kernel, {"block": 8, "block_c": 16})
    compile_kernel(axial_backward.attention_backward_kernel, {**blocks, "pooled": True})
    compile_long_lines_backward(blocks, grad_gate="*fp32")
    compile_kernel(gate.scale_columns_kernel, {"block": 64})
    compile_kernel(gate.scale_columns_backward_kernel, {"block_h": 4, "block": 64})
    layers: dict[str, Any] = {"layers": 1, "block": 16, "block_c": 16, "block_w": 16}
    types: dict[str, Any] = {"hidden": ("*bf16",)}
    compile_kernel(gate.gate_kernel, {**layers, "block_out": 16, "program_c": 32, "save_states": True}, **types)
    compile_kernel(gate.gate_backward_kernel, layers, **types)
    compile_kernel(gate.gate_weights_kernel, {"layers": 1, "block": 16, "block_p": 16}, grads="*fp32", **types)
    compile_cross_entropy([2])
    compile_batch_norm({"block": 8, "block_c": 16}, {"block": 16, "block_c": 16}, 1)
    compile_resizing(8, 64)


def compile_used_blocks() -> None:
    compile_axial()
    compile_gate()
    compile_cross_entropy([2, 19, 59, 171, 255, 300])
    compile_batch_norm({"block": 32, "block_c": 128}, {"block": 256, "block_c": 16}, 4)
    compile_resizing(64, max_pool.BLOCK)


def compile_axial() -> None:
    sizes = {"block_d": 64, "gated": True}
    for length in (33, 65, 97, 129):
        blocks = axial_forward.tail_blocks(length, 512, torch.bfloat16)
        kernel = axial_forward.attention_with_tail_kernel
        if blocks is None:
            blocks, kernel = axial_forward.single_blocks(length, 512, torch.bfloat16), axial_forward.attention_kernel
        compile_axial_kernel(kernel, {**sizes, **(blocks or {}), "program_c": 512})
    for capability, block_d in ((90, 64), (90, 128), (90, 256), (89, 64), (89, 128)):
        blocks = axial_forward.long_blocks(257, 512, block_d, torch.bfloat16, SHARED_MEMORY[capability])
        options = {**sizes, **blocks, "block_d": block_d}
        compile_axial_kernel(axial_forward.long_attention_kernel, options, capability=capability)
    compile_kernel(axial_forward.pool_kernel, {"block": 8, "block_c": 512})
    blocks = {**sizes, "block": 128, "block_c": 64}
    compile_kernel(axial_backward.attention_backward_kernel, {**blocks, "pooled": True}, 8)
    compile_long_lines_backward({**blocks, "block": 64}, grad_gate="*fp32")

    names = "keys values gate out grad grad_pooled grad_keys grad_values grad_gate"
    types: dict[str, Any] = dict.fromkeys(names.split(), "*fp32")
    single = axial_forward.single_blocks(32, 512, torch.float32) or {}
    compile_axial_kernel(axial_forward.attention_kernel, {**sizes, **single, "program_c": 512}, **types)
    blocks = axial_forward.long_blocks(65, 512, 64, torch.float32, SHARED_MEMORY[90])
    compile_axial_kernel(axial_forward.long_attention_kernel, {**sizes, **blocks}, **types)
    blocks = {**sizes, "block": 32, "block_c": 32}
    compile_kernel(axial_backward.attention_backward_kernel, {**blocks, "pooled": True}, **types)
    compile_long_lines_backward(blocks, **types)


def compile_axial_kernel(kernel: Any, options: dict[str, Any], capability: int = 90, **types: Any) -> None:
    constants = {name: value for name, value in options.items() if name not in ("num_warps", "num_stages", "maxnreg")}
    compile_kernel(kernel, constants, options["num_warps"], options.get("num_stages", 3), capability, **types)


def compile_long_lines_backward(blocks: dict[str, Any], **types: Any) -> None:
    for kernel in ("delta_kernel", "values_backward_kernel", "keys_backward_kernel"):
        compile_kernel(getattr(axial_backward, kernel), {**blocks, "pooled": True}, **types)


def compile_gate() -> None:
    compile_kernel(gate.scale_columns_kernel, {"block": 2048})
    compile_kernel(gate.scale_columns_backward_kernel, {"block_h": 4, "block": 512})
    pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    bf16, fp32 = pointers
    for dtype, weight_dtype in ((bf16, bf16), (bf16, fp32), (fp32, fp32)):
        names = "pooled gates states grad grad_logits grad_states grad_pooled"
        types: dict[str, Any] = dict.fromkeys(names.split(), pointers[dtype])
        weight = pointers[weight_dtype]
        for width in (64, MAX_GATE_ROW_BYTES // weight_dtype.itemsize):
            constants = {"layers": 4, **gate.gate_blocks(512, width, dtype)}
            warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
            types |= {"first": weight, "last": weight, "hidden": (weight,) * 4}
            forward = {**constants, "block_out": constants["block_c"] // 2, "program_c": 512, "save_states": True}
            compile_kernel(gate.gate_kernel, forward, warps, stages, **types)
            compile_kernel(gate.gate_backward_kernel, constants, warps, stages, **types)
        compile_kernel(gate.gate_weights_kernel, {"layers": 4, "block": 64, "block_p": 64}, grads="*fp32", **types)


def compile_cross_entropy(numbers_of_classes: list[int]) -> None:
    for classes in numbers_of_classes:
        constants: dict[str, Any] = {"ignore_index": 255, "weighted": True, "smoothed": True, "exact": False}
        constants |= {"block_w": cross_entropy.FEATURES, **cross_entropy.block_sizes(classes)}
        warps = constants.pop("num_warps")
        compile_kernel(cross_entropy.cross_entropy_kernel, constants, warps, grads="*fp32")


def compile_batch_norm(tile: dict[str, int], merge: dict[str, int], unroll: int) -> None:
    parts: dict[str, Any] = {"parts": "*fp32"}
    compile_kernel(batch_norm.moments_kernel, {**tile, "unroll": unroll}, **parts)
    compile_kernel(batch_norm.merge_moments_kernel, merge, 8, **parts)
    elementwise = {**tile, "tiles_per_program": 2 * unroll}
    compile_kernel(batch_norm.normalize_kernel, {**elementwise, "has_residual": True, "relu": True})
    flags = {"has_mask": True, "has_grad2": True, "relu": True}
    compile_kernel(batch_norm.grad_sums_kernel, {**tile, **flags, "unroll": unroll}, **parts)
    compile_kernel(batch_norm.merge_grad_sums_kernel, merge, 8, **parts)
    compile_kernel(batch_norm.grad_features_kernel, {**elementwise, "apply_relu": True})


def compile_resizing(channels: int, block: int) -> None:
    constants = {"channels": channels, "block": block}
    compile_kernel(max_pool.max_pool_kernel, {**constants, "save_positions": True})
    compile_kernel(max_pool.max_pool_backward_kernel, constants)
    compile_kernel(resize.resize_kernel, {**constants, "align_corners": True})


if __name__ == "__main__":
    print_error_on_cpu()
    {"small": compile_small_blocks, "used": compile_used_blocks}[sys.argv[1]]()
