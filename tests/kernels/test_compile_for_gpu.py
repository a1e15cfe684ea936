"""Every kernel compiles for a GPU, on a machine without one: the interpreter accepts more than the compiler does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from caaseg.kernels import axial_backward, axial_forward, batch_norm, cross_entropy, gate, max_pool, resize

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")


@pytest.mark.parametrize(("blocks", "number"), [("small", 23), pytest.param("used", 52, marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu_and_none_runs_on_a_cpu(blocks: str, number: int) -> None:
    # In its own process, because this process uses Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), blocks]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    error, *lines = done.stdout.splitlines()
    assert error == "implementation is 'fused', but the maps are on cpu; expected a GPU; use 'auto'"
    sizes = [(name, int(size)) for name, size in map(str.split, lines)]
    modules = (axial_backward, axial_forward, batch_norm, cross_entropy, gate, max_pool, resize)
    assert {name for name, _ in sizes} == {name for module in modules for name in vars(module) if "_kernel" in name}
    assert len(sizes) == number
    assert min(size for _, size in sizes) > 0
