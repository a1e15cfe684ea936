"""torchvision beside any torch."""

import subprocess
import sys

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
