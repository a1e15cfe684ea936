"""Every kernel compiles for a GPU, on a machine without one: the interpreter takes more than the compiler does."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# In a process of its own: here the kernels are the interpreter's.
SCRIPT = """
import inspect
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from caaseg.attention import fused
from caaseg.kernels import gate as gate_kernels
from caaseg.kernels import axial as kernels
from caaseg.kernels import launches
from caaseg.kernels import axial_long as long_kernels
from caaseg.kernels import batch_norm as normalization_kernels
from caaseg.kernels import cross_entropy as upsampled
from caaseg.kernels.cross_entropy_kernel import cross_entropy_kernel

WHOLE = "lines length step_line step_position depth key_depth size positions width height h w classes".split()
WIDE = dict.fromkeys(["sums", "deltas", "weights", "losses"], "*fp32")
REAL = dict.fromkeys(["share", "slope", "step_x", "step_y"], "fp32")


def compiled(kernel, chosen, warps=4, stages=3, **types):
    kernel = kernel.function
    names = list(inspect.signature(kernel.fn).parameters)
    known = {**dict.fromkeys(WHOLE, "i32"), **WIDE, **REAL, **types, **dict.fromkeys(chosen, "constexpr")}
    source = ASTSource(
        kernel,
        {name: known.get(name, "*bf16") for name in names},
        constexprs={(names.index(name),): value for name, value in chosen.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.metadata.shared <= 227 * 1024  # what one program may have of a GPU's fast memory
    if kernel.__name__ in ("normalize_kernel", "moments_end_kernel"):
        assert "max.NaN.f32" in made.asm["ptx"]  # what is not a number stays so; the interpreter's maximum always does
    print(kernel.__name__, len(made.asm["cubin"]))


short, long = dict(block_d=64, block_c=64, gated=True), dict(block_d=64, block=64, block_c=64, gated=True)
for block in (32, 64, 128):
    compiled(kernels.gather_with_tail_kernel, dict(short, block=block, tail=16, span=512))
compiled(kernels.gather_kernel, dict(short, block=128, one_block=True, span=512), 8)
compiled(kernels.gather_kernel, dict(long, one_block=False, span=64))
compiled(kernels.gather_backward_kernel, dict(short, block=128, pooled=True), 8)
compiled(long_kernels.delta_kernel, dict(long, pooled=True))
compiled(long_kernels.values_backward_kernel, dict(long, pooled=True), grad_gate="*fp32")
compiled(long_kernels.keys_backward_kernel, dict(long, pooled=True))
compiled(kernels.pool_kernel, dict(block=8, block_c=512))
compiled(kernels.scale_kernel, dict(block=2048))
compiled(kernels.scale_backward_kernel, dict(block_l=4, block=512))
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
for dtype, of_weights in ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2):
    name, weights = NAMES[dtype], NAMES[of_weights]
    for width in (64, fused.WIDEST_GATE // of_weights.itemsize):
        gate = dict(layers=4, **launches.gate_blocks(512, width, dtype))
        tuned = dict(warps=gate.pop("num_warps"), stages=gate.pop("num_stages"))
        types = dict.fromkeys("pooled gates states grad grad_logits grad_states grad_pooled".split(), name)
        types |= dict(first=weights, last=weights, hidden=(weights,) * 4)
        compiled(gate_kernels.gate_kernel, dict(gate, kept=True), **tuned, **types)
        compiled(gate_kernels.gate_backward_kernel, gate, **tuned, **types)
    types = dict.fromkeys("pooled states grad_logits grad_states".split(), name)
    compiled(gate_kernels.gate_weights_kernel, dict(layers=4, block=64, block_p=64), grads="*fp32", **types)
wide = dict.fromkeys("keys values gate out grad grad_pooled grad_keys grad_values grad_gate".split(), "*fp32")
compiled(kernels.gather_kernel, dict(block_d=64, block_c=32, gated=True, block=32, one_block=True, span=512), **wide)
compiled(kernels.gather_backward_kernel, dict(block_d=64, block_c=32, gated=True, block=32, pooled=True), **wide)
parts = dict(block_d=64, block=32, block_c=32, gated=True)
compiled(kernels.gather_kernel, dict(parts, one_block=False, span=32), **wide)
compiled(long_kernels.delta_kernel, dict(parts, pooled=True), **wide)
compiled(long_kernels.values_backward_kernel, dict(parts, pooled=True), **wide)
compiled(long_kernels.keys_backward_kernel, dict(parts, pooled=True), **wide)
for classes in (2, 19, 59, 171, 255, 300):
    loss = dict(ignore=255, weighted=True, exact=False, block_w=upsampled.FEATURES, **upsampled.tile(classes))
    compiled(cross_entropy_kernel, loss, loss.pop("num_warps"), labels="*u8", lines="*fp32")
types = dict.fromkeys("parts moments sums running_mean running_var weight bias".split(), "*fp32")
types |= dict(rows="i32", channels="i32", number="i32", share="i32", signs="*u8", momentum="fp32", epsilon="fp32")
tile, ends = dict(block=32, block_c=128), dict(block=256, block_c=16)
compiled(normalization_kernels.moments_kernel, dict(tile, unroll=4), **types)
compiled(normalization_kernels.moments_end_kernel, ends, 8, **types)
compiled(normalization_kernels.normalize_kernel, dict(tile, summed=True, relu=True, repeats=8), **types)
compiled(normalization_kernels.sums_kernel, dict(tile, summed=True, twice=True, relu=True, unroll=4), **types)
compiled(normalization_kernels.sums_end_kernel, ends, 8, **types)
compiled(normalization_kernels.spread_kernel, dict(tile, masked=True, repeats=8), **types)
"""


def test_every_kernel_compiles_for_a_gpu() -> None:
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 45
    assert min(sizes) > 0
