"""Every kernel compiles for a GPU, on a machine without one: the interpreter accepts more than the compiler does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")


def test_every_kernel_compiles_for_a_gpu() -> None:
    # A process of its own, because in this one triton interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 45
    assert min(sizes) > 0
