"""Run `caaseg train` on two ranks, as torchrun starts them, and print the exit code of each.

    python -m tests.training.two_ranks FAULT OUT

FAULT is none, or happens in step 2 of rank 1: kill, stop (with SIGSTOP) or nan (a loss that is not finite). The process
imports everything once and forks the ranks.
"""

import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch

import caaseg
import caaseg.api
from caaseg.cli import main
from caaseg.models import Prediction
from caaseg.training import ranks, setup
from tests.training.small import SMALL_ARGUMENTS

TIMEOUT_S = 5


def run_rank(rank: int, port: int, fault: str, out: Path) -> int:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(group | own)
    torch.set_num_threads(1)
    ranks.RANK_TIMEOUT = timedelta(seconds=TIMEOUT_S)
    coarse, calls = caaseg.Segmenter.coarse, 0

    def faulty(model: caaseg.Segmenter, images: torch.Tensor) -> Prediction:
        nonlocal calls
        calls += 1
        prediction = coarse(model, images)
        if calls != 2 or rank == 0:
            return prediction
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return prediction._replace(logits=prediction.logits * float("nan"))

    if fault != "none":
        caaseg.Segmenter.coarse = faulty  # type: ignore[method-assign,assignment]
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(out), *SMALL_ARGUMENTS]
    try:
        return main([*arguments, "--model.head", "fcn", "--steps", "3", "--checkpoint_every", "1"])
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
    setup.make_fabric(setup.Processes(torch.device("cpu"), 1, 1), "32")  # imports lightning
    children = [start(rank, free_port, sys.argv[1], Path(sys.argv[2])) for rank in (0, 1)]
    first = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
    if sys.argv[1] == "stop":
        os.kill(children[1], signal.SIGKILL)
    second = os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1])
    print(f"\nexit codes {first} {second}")
