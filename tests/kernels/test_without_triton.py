"""The package works in an environment without triton."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("without_triton.py")


def test_the_package_imports_and_trains_without_triton() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "implementation is 'fused', but the package triton is not installed" in done.stdout
