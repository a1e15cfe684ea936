"""Run `caaseg train` on two ranks, as torchrun starts them, and print the exit code of each.

    python -m tests.training.two_ranks FAULT OUT

FAULT is none, or happens in step 2 of rank 1: kill, stop (with SIGSTOP) or nan (a loss that is not finite). The process
imports everything once and forks the ranks.
"""

import os
import signal
import socket
import sys
from pathlib import Path

import torch

import caaseg.api  # noqa: F401  imported once, before the forks
from caaseg.cli import main
from caaseg.training import setup
from tests.processes import shorten_rank_timeout
from tests.training.small import SMALL_ARGUMENTS

TIMEOUT_S = 5
FAILING = Path(__file__).with_name("failing_heads.py")
HEADS = {
    "none": "fcn",
    "kill": f"{FAILING}:KilledHead",
    "stop": f"{FAILING}:StoppedHead",
    "nan": f"{FAILING}:SecondRankNaNHead",
}


def run_rank(rank: int, port: int, fault: str, out: Path) -> int:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(group | own)
    torch.set_num_threads(1)
    shorten_rank_timeout(TIMEOUT_S)
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(out), *SMALL_ARGUMENTS]
    try:
        return main([*arguments, "--model.head", HEADS[fault], "--steps", "3", "--checkpoint_every", "1"])
    except SystemExit as end:
        return int(str(end.code))


def start(rank: int, port: int, fault: str, out: Path) -> int:
    child = os.fork()
    if child == 0:
        code = run_rank(rank, port, fault, out)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port: int = free.getsockname()[1]
    setup.make_fabric(setup.Processes(torch.device("cpu"), 1, 1), "32")  # imports lightning_fabric
    children = [start(rank, free_port, sys.argv[1], Path(sys.argv[2])) for rank in (0, 1)]
    first = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
    if sys.argv[1] == "stop":
        os.kill(children[1], signal.SIGKILL)
    second = os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1])
    print(f"\nexit codes {first} {second}")
