"""Runs a training that is killed with SIGKILL again and again, and resumed, until it is done.

    python -m tests.training.killing FOLDER KILLS SEED WORKERS

The process imports everything once and forks each run, so that a kill costs no more than what it destroys. Every third
kill comes from inside, when a checkpoint is half written; the others at any moment after the first step has begun.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from caaseg.config import Recipe
from caaseg.training.metrics_log import FILE
from caaseg.training.run import train
from tests.training.small import small_recipe

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # whether a child has ended, which is then still to be waited for


def recipe(workers: int) -> Recipe:
    return small_recipe(
        *("--steps", "60", "--checkpoint_every", "4", "--validate_every", "25", "--data.workers", str(workers)),
        *("--optimizer.ema", "0.9", "--batch_size", "4", "--accumulate", "2", "--model.aux", "true"),
    )


def started(folder: Path, workers: int, checkpoints: int | None = None) -> int:
    """Fork a run and wait until its loop starts, which rewrites the metrics log.

    With a number of checkpoints, it dies while it writes the checkpoint after them.
    """
    before = identity(folder / FILE)
    child = os.fork()
    if child:
        while identity(folder / FILE) == before and os.waitid(os.P_PID, child, ENDED) is None:
            time.sleep(0.001)
        return child
    try:
        torch.set_num_threads(1)
        if checkpoints is not None:
            torch.save = dying(torch.save, checkpoints)
        train(recipe(workers), folder, resume="auto", device="cpu")
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


def identity(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced."""
    if not path.exists():
        return None
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def dying(save: Any, checkpoints: int) -> Any:
    saved = 0

    def save_and_die(state: Any, path: Path) -> None:
        nonlocal saved
        save(state, path)
        saved += 1
        if saved > checkpoints:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    return save_and_die


def main(folder: Path, kills: int, seed: int, workers: int) -> None:
    rng = random.Random(seed)
    child = started(folder / "whole", workers)
    began = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    duration_s = time.monotonic() - began
    killed = turn = 0
    while True:
        run = folder / f"killed-{turn}"
        inside = killed % 3 == 1
        child = started(run, workers, rng.randrange(2) if inside and killed < kills else None)
        if killed < kills and not inside:
            time.sleep(rng.uniform(0, min(1.0, 3 / kills) * duration_s))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            last = max((path.stem for path in run.glob("checkpoints/step-*.pt")), default="none")
            print(f"kill {killed}{' while writing' if inside else ''}: newest checkpoint {last}", flush=True)
        elif status != 0:
            sys.exit("the run failed")
        elif killed == kills:
            break
        else:  # it was over before it was killed as often as asked: another one
            turn += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
