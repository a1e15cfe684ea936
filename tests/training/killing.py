"""Runs a training that is killed with SIGKILL again and again, and resumed, until it is done.

    python -m tests.training.killing FOLDER KILLS SEED WORKERS

The process imports everything once and forks each run, so that a kill costs no more than what it destroys. Every third
kill comes from inside, when a checkpoint is half written.
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
from caaseg.training import runs
from tests.training.small import small_recipe


def recipe(workers: int) -> Recipe:
    return small_recipe(
        *("--steps", "60", "--checkpoint_every", "4", "--validate_every", "25", "--data.workers", str(workers)),
        *("--optimiser.ema", "0.9", "--batch_size", "4", "--accumulate", "2", "--model.aux", "true"),
    )


def forked(folder: Path, workers: int, checkpoints: int | None = None) -> int:
    """Start a run; with a number of checkpoints it dies while it writes the one after them."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        if checkpoints is not None:
            torch.save = dying(torch.save, checkpoints)  # type: ignore[assignment]
        runs.train(recipe(workers), folder, resume="auto", device="cpu")
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


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
    started = time.monotonic()
    child = forked(folder / "whole", workers)
    assert os.waitpid(child, 0)[1] == 0
    duration_s = time.monotonic() - started
    killed = 0
    while killed < kills:
        inside = killed % 3 == 1
        child = forked(folder / "killed", workers, rng.randrange(2) if inside else None)
        if not inside:
            # Short lives, or the run would be over before it was killed often.
            time.sleep(rng.uniform(0, 2.5 * duration_s / kills))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
            sys.exit("the run failed")
        if os.WIFEXITED(status):
            sys.exit(f"the run was over after {killed} kills")
        killed += 1
        last = max((path.stem for path in (folder / "killed").glob("checkpoints/step-*.pt")), default="none")
        print(f"kill {killed}{' while writing' if inside else ''}: newest checkpoint {last}", flush=True)
    assert os.waitpid(forked(folder / "killed", workers), 0)[1] == 0
    print(f"killed {killed} times; uninterrupted it takes {duration_s:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
