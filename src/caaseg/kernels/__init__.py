"""Optional Triton kernels, one file per operator. No other package imports triton.

The modules of this package import triton: import them only where `HAS_TRITON` is true.
"""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

HAS_TRITON = find_spec("triton") is not None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

logger = logging.getLogger(__name__)


def is_supported(tensor: Tensor) -> bool:
    """Return whether the kernels can process a tensor: it is on a GPU on which they run, and has one of `DTYPES`."""
    return HAS_TRITON and tensor.is_cuda and tensor.dtype in DTYPES and kernels_run(tensor.device)


def replace_torch(features: Tensor) -> bool:
    """Return whether the kernels may replace operators of torch without being asked for.

    Features must be supported and channels last in memory, and nothing traces or transforms torch's operators.

    Args:
        features: a map (N, C, H, W).
    """
    return (
        HAS_TRITON
        and features.is_cuda
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        # torch.func has no public function to query whether a transform is active.
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad.unpack_dual(features).tangent is None  # type: ignore[no-untyped-call]
        and features.shape[1] > 1
        and features.shape[2:].numel() > 1
        and features.is_contiguous(memory_format=torch.channels_last)
        and is_supported(features)
    )


@cache
def kernels_run(device: torch.device) -> bool:
    """Return whether kernels can be compiled for a GPU and run on it; log a warning if not."""
    from caaseg.kernels.common import try_kernel

    try:
        try_kernel(device)
    except Exception as error:  # of Triton, its C compiler, its cache or the driver
        message = " ".join(str(error).split())[:200]
        logger.warning("Triton kernels do not run on %s, so torch's operators are used instead: %s", device, message)
        return False
    return True
