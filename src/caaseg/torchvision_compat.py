"""Make torchvision importable next to a torch build that its compiled operators do not match."""

import sys
from functools import cache
from importlib.util import find_spec

import torch


@cache
def declare_missing_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms` if importing torchvision fails without them.

    Call this before the first import of torchvision, or of a package that imports it, such as timm.

    PyPI's torchvision wheel is built for CUDA torch. With a CPU-only torch its library does not load, and its Python
    code then fails on import ("operator torchvision::nms does not exist", then "qnms"). Declaring both operators
    without an implementation is enough: neither the transforms nor timm's models call them. If torchvision imports
    normally, nothing is declared, because declaring an operator twice is an error.
    """
    if find_spec("torchvision") is None:
        return  # the caller's own import raises a clear error
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # partly imported modules must be imported again
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", schema)
