"""Triton kernels, optional: everything that imports triton is here.

Modules of this package import triton when they are imported. Check `HAS_TRITON` first.
"""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
