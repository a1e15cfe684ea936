"""Processes that train together, called ranks: sums over all of them, and errors that end all of them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from subprocess import Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caaseg.errors import CaasegError
from caaseg.models.cuda_graphs import preserve_state
from caaseg.process_group import is_distributed, leaving_group

if TYPE_CHECKING:
    from lightning_fabric import Fabric

RANK_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it ends."""
GRACE_S = 10
"""Seconds that a failed process has to print its message and end."""


class LostRankError(CaasegError):
    """Another process of the run has ended, or does not answer."""


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def copy_first_buffers(module: nn.Module) -> None:
    """Copy the buffers of the first rank to all ranks. On a CPU, each rank has its own batch norm statistics."""
    if is_distributed():
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def copy_first_state(module: nn.Module) -> None:
    """Copy weights and buffers of the first rank to all ranks, as DistributedDataParallel does at its start."""
    if is_distributed():
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def average_gradients(module: nn.Module) -> None:
    """Average the gradients over all ranks, for a module without DistributedDataParallel.

    All gradients of a dtype are averaged as one tensor, and become views of it. All ranks must have gradients of the
    same parameters, with the same strides.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for parameters in by_dtype.values():
        gradients = [_dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients])
        sum_over_ranks(flat.div_(dist.get_world_size()))
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
            parameter.grad = part.as_strided(gradient.shape, gradient.stride())


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient without gaps between its elements, in any order, so that no copy is needed to flatten it."""
    is_channels_last = gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)
    return gradient if is_channels_last else gradient.contiguous()


def freeze_unused_parameters(module: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Freeze parameters without influence on the loss: DistributedDataParallel expects gradients of all others.

    Buffers and random numbers stay the same. All ranks must call it: batch norm may be synchronized.

    Args:
        module: the module in training.
        compute_loss: forward pass and loss of any batch.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with preserve_state(module):
        gradients = torch.autograd.grad(compute_loss(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def match_gradient_strides(module: nn.Module) -> None:
    """Give gradients of kernels with a side of 1 the strides of their parameter, which DistributedDataParallel expects.

    The stride of a dimension of size 1 has no meaning, and operators choose it freely. DDP warns if a gradient has
    other strides than its bucket, which has those of the parameter. A view with other strides copies no data.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and 1 in parameter.shape:
            parameter.register_hook(partial(_with_strides, parameter.stride()))  # type: ignore[no-untyped-call]


def _with_strides(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    pairs = zip(gradient.shape, gradient.stride(), strides, strict=True)
    same_order = all(size == 1 or own == expected for size, own, expected in pairs)
    return gradient.as_strided(gradient.shape, strides) if same_order else gradient


@contextmanager
def end_together() -> Iterator[None]:
    """End all ranks if the block fails on any: the first rank raises the error, the others exit with code 2.

    So the user sees one message. All ranks must enter the block; the block itself must not communicate.
    """
    error: CaasegError | OSError | None = None
    try:
        yield
    except (CaasegError, OSError) as raised:
        error = raised
    errors: list[Any] = [error]
    if is_distributed():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if dist.get_rank() > 0 and any(errors):
            sys.exit(2)
    for found in errors:
        if found is not None:
            raise error or found


@contextmanager
def joined_ranks() -> Iterator[list["Popen[bytes]"]]:
    """Yield a list for the processes that `launch` starts, and end these processes after an error.

    At the end, this process leaves the process group, unless it had joined before.

    Raises LostRankError if another rank has ended or does not answer.
    """
    joined_before = is_distributed()
    started: list[Popen[bytes]] = []
    try:
        with nullcontext() if joined_before else leaving_group(), _explain_lost_rank():
            yield started
    except BaseException as error:
        _end_processes(started, error)
        raise


def launch(fabric: "Fabric") -> list["Popen[bytes]"]:
    """Start or join the other ranks. Return the processes that this process has started."""
    fabric.launch()
    processes: list[Popen[bytes]] = getattr(fabric.strategy.launcher, "procs", [])
    started = processes.copy()
    processes.clear()  # lightning kills this process when one of them fails, before it can print its message
    return started


@contextmanager
def _explain_lost_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = "does not answer" if "Timed out" in str(error) else "has ended"
        raise LostRankError(
            f"another process of this run {reason}; see its message, then continue with --resume auto"
        ) from error


def _end_processes(processes: Sequence["Popen[bytes]"], error: BaseException) -> None:
    """End the started processes after an error. A process that has failed itself gets time to print its message."""
    for process in processes:
        if isinstance(error, LostRankError):
            with suppress(TimeoutExpired):  # a stopped process
                process.wait(GRACE_S)
        process.kill()
        process.wait()
