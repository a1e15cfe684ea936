"""torchvision beside any torch."""

import os
import subprocess
import sys
from pathlib import Path

import caaseg

PROBE = """
from caaseg.torchvision_compat import declare_missing_operators
declare_missing_operators()
import torch, torchvision
from torchvision.transforms.v2 import functional
declare_missing_operators.cache_clear()
declare_missing_operators()  # again, where they now exist
print(functional.horizontal_flip_image(torch.arange(3).reshape(1, 1, 3)).tolist())
"""


def test_torchvision_imports_and_transforms_after_the_declaration() -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.strip() == "[[[2, 1, 0]]]"


def test_what_torchvision_declares_itself_is_left_to_it(tmp_path: Path) -> None:
    """However its library is called: declared twice, an operator ends the process."""
    (tmp_path / "torchvision").mkdir()
    own = 'import torch; torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float x) -> Tensor")'
    (tmp_path / "torchvision" / "__init__.py").write_text(own)
    probe = (
        "from caaseg.torchvision_compat import declare_missing_operators; declare_missing_operators(); "
        "import torch, torchvision; print(torch.ops.torchvision.nms.default._schema.arguments[2].name)"
    )
    source = str(Path(caaseg.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])},
    )
    assert result.stderr == ""
    assert result.stdout.strip() == "x"
