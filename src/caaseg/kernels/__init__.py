"""Optional Triton kernels, one file per operator. No other package imports triton.

The modules of this package import triton: import them only where `HAS_TRITON` is true.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_supported(tensor: Tensor) -> bool:
    """Return whether the kernels can process a tensor: triton, a tensor on a GPU, and one of `DTYPES`."""
    return HAS_TRITON and tensor.is_cuda and tensor.dtype in DTYPES
