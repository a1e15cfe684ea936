"""Child processes of tests.

A server process imports torch and caaseg once and forks every child. The process that runs the tests does not fork: it
has threads, and a lock that a thread holds during a fork is never released in the child.
"""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from caaseg.cli import main
from caaseg.training.ranks import RANK_TIMEOUT

TIME_LIMIT_S = 120
"""A child that takes longer is killed, and its test fails."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["caaseg.api", "caaseg.training.run", "pytest"])


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a module-level function in a child process, with environment and warning filters of this process."""
    inherited = (dict(os.environ), list(warnings.filters))
    child = CONTEXT.Process(target=_run_like_parent, args=(*inherited, function, *arguments))
    child.start()
    return child


def join(*children: BaseProcess) -> list[int | None]:
    """Wait for children; return their exit codes. The exit code of a killed child is minus the signal."""
    for child in children:
        child.join(TIME_LIMIT_S)
    late = [child for child in children if child.is_alive()]
    for child in late:
        child.kill()
        child.join()
    assert not late, f"{len(late)} of {len(children)} child processes took longer than {TIME_LIMIT_S} s"
    return [child.exitcode for child in children]


def run(function: Callable[..., object], *arguments: object) -> int | None:
    """Run a function in a child process; return its exit code, or minus the signal that killed it."""
    [code] = join(start(function, *arguments))
    return code


def exit_with_command(arguments: Sequence[str]) -> None:
    """Run a caaseg command and end this process with its exit code."""
    sys.exit(main(arguments))


def run_ranks(function: Callable[..., object], *arguments: object) -> list[int | None]:
    """Run a function in two processes with the environment that torchrun sets; return their exit codes.

    Their output is printed when they have ended, so that a test can capture it.
    """
    # The store of the ranks is in this process, as with torchrun: no other process can take its port in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as directory:
        outputs = [Path(directory, rank) for rank in ("0", "1")]
        ranks = [start(_run_rank, output, store.port, function, *arguments) for output in outputs]
        try:
            return join(*ranks)
        finally:
            for descriptor, suffix in ((1, ".out"), (2, ".err")):
                for output in outputs:
                    path = output.with_suffix(suffix)
                    os.write(descriptor, path.read_bytes() if path.exists() else b"")


def _run_like_parent(
    environment: dict[str, str], filters: Sequence[Any], function: Callable[..., object], *arguments: object
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()
    cast("list[Any]", warnings.filters).extend(filters)
    function(*arguments)


def _run_rank(output: Path, port: int, function: Callable[..., object], *arguments: object) -> None:
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), descriptor)
    rank = output.name
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # connect to the store that already exists
    function(*arguments)


def shorten_rank_timeout(seconds: float) -> None:
    """Make torch end a rank of this process after a few seconds without an answer of the others, not after minutes."""
    init_process_group = dist.init_process_group

    def init(*arguments: Any, **options: Any) -> None:
        assert options["timeout"] == RANK_TIMEOUT
        init_process_group(*arguments, **{**options, "timeout": timedelta(seconds=seconds)})

    dist.init_process_group = init
