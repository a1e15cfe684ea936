"""Makes torchvision importable beside a torch that its compiled operators were not built for."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


@cache
def declare_missing_operators() -> None:
    """Call before the first `import torchvision`, or of a package that imports it, such as timm.

    The registry's torchvision wheel is built for CUDA torch. Beside a CPU-only torch its library does not load, and
    its Python side then fails on import, because it describes two operators that nothing has declared ("operator
    torchvision::nms does not exist", then "qnms"). Declared without an implementation they let the import pass; the
    transforms and timm's networks call neither. Does nothing where torchvision's own operators load.
    """
    package = find_spec("torchvision")
    if package is None:
        return  # its own import says so better
    for folder in package.submodule_search_locations or ():
        for library in Path(folder).glob("_C.*"):
            try:
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            except OSError:  # built for another torch
                continue
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
