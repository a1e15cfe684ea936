"""Child processes of tests. They are forked, so that they need not import torch again."""

import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from caaseg.cli import main
from caaseg.training.ranks import RANK_TIMEOUT


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a function in a child process."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks of processes with threads
        child.start()
    return child


def run(function: Callable[..., object], *arguments: object) -> int | None:
    """Run a function in a child process; return its exit code, or minus the signal that killed it."""
    child = start(function, *arguments)
    child.join()
    return child.exitcode


def exit_with_command(arguments: Sequence[str]) -> None:
    """Run a caaseg command and end this process with its exit code."""
    sys.exit(main(arguments))


def run_ranks(function: Callable[..., object], *arguments: object) -> list[int | None]:
    """Run a function in two processes with the environment that torchrun sets; return their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [start(_run_rank, rank, port, function, *arguments) for rank in ("0", "1")]
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def _run_rank(rank: str, port: str, function: Callable[..., object], *arguments: object) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="test")
    function(*arguments)


def shorten_rank_timeout(seconds: float) -> None:
    """Make torch end a rank of this process after a few seconds without an answer of the others, not after minutes."""
    init_process_group = dist.init_process_group

    def init(*arguments: Any, **options: Any) -> None:
        assert options["timeout"] == RANK_TIMEOUT
        init_process_group(*arguments, **{**options, "timeout": timedelta(seconds=seconds)})

    dist.init_process_group = init
