"""torchvision can be imported next to any torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import caaseg

PROBE = Path(__file__).with_name("torchvision_probe.py")
SOURCE = str(Path(caaseg.__file__).parents[1])


def run_probe(name: str, *, path: tuple[str, ...] = ()) -> str:
    """Run a function of the probe in a fresh process, with further directories to import from."""
    result = subprocess.run(
        [sys.executable, "-W", "error", str(PROBE), name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, SOURCE])},
    )
    assert result.stderr == ""
    return result.stdout.strip()


@pytest.mark.slow
def test_torchvision_transforms_work_after_the_declaration() -> None:
    assert run_probe("flip") == "[[[2, 1, 0]]]"


def test_operators_that_torchvision_declares_are_not_declared_again(tmp_path: Path) -> None:
    """Declaring an operator twice ends the process."""
    (tmp_path / "torchvision").mkdir()
    own = 'import torch; torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float x) -> Tensor")'
    (tmp_path / "torchvision" / "__init__.py").write_text(own)
    assert run_probe("argument_name", path=(str(tmp_path),)) == "x"
