"""Joining and leaving a group of processes that torchrun or SLURM started."""

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from caaseg.errors import CaasegError

if dist.is_available():
    # Functions of this module have the group of all processes as a default argument. If it were imported later, for
    # example by DistributedDataParallel, they would refer to the group forever, and `leave_group` could not delete it.
    import torch.distributed.nn

THREAD_GRACE_S = 0.1
"""Time after an error in which the threads of a group can finish."""


class Process(NamedTuple):
    """Device and rank of this process among the processes that work together."""

    device: torch.device
    rank: int
    ranks: int


def is_distributed() -> bool:
    """Return whether this process has joined others."""
    return dist.is_available() and dist.is_initialized()


def environment_integer(name: str, default: str | None = None) -> int:
    """Return the value of an environment variable that torchrun or SLURM sets; CaasegError if it is not a number."""
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal():
        found = "is not set" if text is None else f"is {text!r}"
        raise CaasegError(
            f"the environment variable {name} {found}; expected a number, as torchrun and SLURM set it; unset the "
            "variables of torchrun and SLURM to start a single process"
        )
    return int(text)


@contextmanager
def join_processes(device: torch.device, *, timeout: timedelta | None = None) -> Iterator[Process]:
    """Join the processes started by torchrun, if any, each on its own GPU if `device` is a GPU.

    Args:
        device: the kind of device to use.
        timeout: how long a process waits for the others; None is torch's default.
    """
    ranks = environment_integer("WORLD_SIZE", "1")
    if ranks == 1:
        yield Process(device, 0, 1)
        return
    if (rank := environment_integer("RANK")) >= ranks:
        raise CaasegError(f"RANK is {rank}, but WORLD_SIZE is {ranks}; start all processes with torchrun")
    if device.type == "cuda":
        device = torch.device("cuda", environment_integer("LOCAL_RANK"))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except ValueError as error:  # an environment variable is missing or not valid
        raise CaasegError(f"WORLD_SIZE is {ranks}, but {error}; start all processes with torchrun") from error
    with leaving_group():
        yield Process(device, dist.get_rank(), ranks)


@contextmanager
def leaving_group() -> Iterator[None]:
    """Leave the process group at the end of the block, if this process joined one in or before it."""
    try:
        yield
    except BaseException:
        if is_distributed():
            _abandon_group()
        raise
    if is_distributed():
        leave_group()


def leave_group() -> None:
    """Leave the process group and wait until its threads have ended. No communication may be unfinished.

    A thread that deletes its last tensors while the interpreter ends would abort the process. The destructor of the
    group ends the threads. It waits for them without the interpreter's lock only if Python deletes the group, so
    DistributedDataParallel, which also refers to it, is deleted first.
    """
    gc.collect()  # DistributedDataParallel is part of reference cycles
    group = dist.group.WORLD
    dist.destroy_process_group()
    del group


def _abandon_group() -> None:
    """Leave the process group after an error, without its destructor, which could wait forever for a lost rank."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()
    time.sleep(THREAD_GRACE_S)
