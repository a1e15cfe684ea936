"""How functions become GPU kernels of Triton, and how these are launched."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run on the processor, step by step in Python: with TRITON_INTERPRET=1, for tests."""


def jit(function: Callable[..., Any]) -> Any:
    """Have Triton compile a function from its source. To Python its tensors and pointers have no types."""
    return triton.jit(function)


def refuse_second_derivatives(instead: str) -> None:
    """To be called by the gradient of kernels, which has none of its own: torch would leave its part out, silently."""
    if torch.is_grad_enabled():  # as with create_graph=True
        raise RuntimeError(f"gradients of GPU kernels cannot be differentiated again; {instead}")


class Kernel:
    """A function that Triton compiles, launched straight once it was compiled for arguments of the same kinds.

    Triton looks at every argument of every launch anew, which may take longer than the kernel itself. What it would
    also do is call the hooks of its own profiler, which does not see these launches; CUDA's profilers do.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = jit(function)
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch on a grid. Constants are the kernel's, in its order, and Triton's own options."""
        if INTERPRETED:
            self.function[grid](*arguments, **constants)
            return
        device = arguments[0].device.index  # the first is always a tensor
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(grid, *arguments, **constants)
            return
        key = (device, *constants.values(), *map(_kind, arguments))
        known = self._compiled.get(key)
        if known is None:
            own = tuple(value for name, value in constants.items() if name in self.function.arg_names)
            compiled = self.function[grid](*arguments, **constants)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, own
        else:
            run, function, metadata, own = known
            stream = triton.runtime.driver.active.get_current_stream(device)
            x, y, z = (*grid, 1, 1)[:3]
            run(x, y, z, stream, function, metadata, None, None, None, *arguments, *own)


def _kind(argument: Any) -> Any:
    """All that Triton makes a difference by; of whole numbers it is less than their value."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    return float if isinstance(argument, float) else argument
