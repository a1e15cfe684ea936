"""Makes torchvision importable beside a torch that its compiled operators were not built for."""

import sys
from functools import cache
from importlib.util import find_spec

import torch


@cache
def declare_missing_operators() -> None:
    """Call before the first `import torchvision`, or of a package that imports it, such as timm.

    The registry's torchvision wheel is built for CUDA torch. Beside a CPU-only torch its library does not load, and
    its Python side then fails on import, because it describes two operators that nothing has declared ("operator
    torchvision::nms does not exist", then "qnms"). Declared without an implementation they let the import pass; the
    transforms and timm's networks call neither. Where torchvision imports as it is, nothing is declared: what its own
    library registers must not be there before.
    """
    if find_spec("torchvision") is None:
        return  # its own import says so better
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # what was imported so far is imported again
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", schema)
