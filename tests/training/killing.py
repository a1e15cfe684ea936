"""Train a run that is killed with SIGKILL and resumed many times, until it is finished.

    python -m tests.training.killing DIRECTORY KILLS SEED WORKERS

The process imports everything once and forks each run. In every third run the process kills itself when a checkpoint is
half-written; the others are killed at a random moment after the first step has started.
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

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # options of waitid: test whether a child has ended


def recipe_with(*options: str) -> Recipe:
    """Return a recipe with EMA, an auxiliary branch and two parts per step."""
    features = ("--optimizer.ema", "0.9", "--batch_size", "4", "--accumulate", "2", "--model.aux", "true")
    return small_recipe(*features, *options)


def start_run(directory: Path, workers: int, checkpoints: int | None = None) -> int:
    """Fork a run and wait until its loop starts, which rewrites the metrics log. Return its process id.

    With `checkpoints`, the run kills itself after this number of checkpoints, while it writes the next one.
    """
    before = identity(directory / FILE)
    child = os.fork()
    if child:
        while identity(directory / FILE) == before and os.waitid(os.P_PID, child, ENDED) is None:
            time.sleep(0.001)
        return child
    try:
        torch.set_num_threads(1)
        if checkpoints is not None:
            torch.save = die_while_saving(torch.save, after=checkpoints)
        intervals = ("--steps", "60", "--checkpoint_every", "4", "--validate_every", "25")
        recipe = recipe_with(*intervals, "--data.workers", str(workers))
        train(recipe, directory, resume="auto", device="cpu")
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


def identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file, which change when it is replaced."""
    if not path.exists():
        return None
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def die_while_saving(save: Any, *, after: int) -> Any:
    """Return a torch.save that works `after` times; the next call writes half a file and kills the process."""
    saved = 0

    def save_and_die(state: Any, path: Path) -> None:
        nonlocal saved
        save(state, path)
        saved += 1
        if saved > after:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    return save_and_die


def main(directory: Path, kills: int, seed: int, workers: int) -> None:
    rng = random.Random(seed)
    child = start_run(directory / "whole", workers)
    start = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    duration_s = time.monotonic() - start
    killed = turn = 0
    while True:
        run = directory / f"killed-{turn}"
        while_writing = killed % 3 == 1
        child = start_run(run, workers, rng.randrange(2) if while_writing and killed < kills else None)
        if killed < kills and not while_writing:
            time.sleep(rng.uniform(0, min(1.0, 3 / kills) * duration_s))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            last = max((path.stem for path in run.glob("checkpoints/step-*.pt")), default="none")
            print(f"kill {killed}{' while writing' if while_writing else ''}: newest checkpoint {last}", flush=True)
        elif status != 0:
            sys.exit("the run failed")
        elif killed == kills:
            break
        else:  # the run finished before the requested number of kills: start another one
            turn += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
