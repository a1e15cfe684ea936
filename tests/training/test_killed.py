"""Runs that are killed, also while they write a checkpoint, and resumed end with the same weights."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from caaseg.config import Recipe
from caaseg.training.metrics_log import read_metrics
from caaseg.training.run import train
from tests import processes
from tests.training.killing import die_while_saving, recipe_with


def train_killed_after_step_10(recipe: Recipe, run: Path) -> None:
    def die(progress: Any) -> None:
        if progress.step == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe, run, resume="auto", device="cpu", progress=die)


def train_killed_in_checkpoint(recipe: Recipe, run: Path) -> None:
    torch.save = die_while_saving(torch.save, after=0)
    train(recipe, run, resume="auto", device="cpu")


def test_a_run_killed_between_and_in_checkpoints_ends_with_identical_weights(tmp_path: Path) -> None:
    recipe, run = (
        recipe_with("--steps", "14", "--checkpoint_every", "4", "--validate_every", "5"),
        tmp_path / "killed-0",
    )
    train(recipe, tmp_path / "whole", device="cpu")
    assert processes.run(train_killed_after_step_10, recipe, run) == -signal.SIGKILL
    assert saved_steps(run) == [4, 8]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [
        5,
        10,
    ]  # step 10 is after the newest checkpoint
    assert processes.run(train_killed_in_checkpoint, recipe, run) == -signal.SIGKILL
    assert saved_steps(run) == [4, 8]
    assert len(list(run.glob("checkpoints/.step-*.part.pt"))) == 1  # half-written
    train(recipe, run, resume="auto", device="cpu")
    assert_identical(run, tmp_path / "whole")
    assert not list(run.glob("checkpoints/.step-*"))


def train_killed_after_step_4(recipe: Recipe, run: Path) -> None:
    def die(progress: Any) -> None:
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe, run, resume="auto", device="cpu", progress=die)


def test_a_killed_run_with_block_dropout_and_recomputed_batch_norm_ends_with_identical_weights(tmp_path: Path) -> None:
    recipe = recipe_with(
        *("--model.block_dropout", "0.2", "--optimizer.ema_batch_norm", "recomputed", "--optimizer.name", "rmsprop"),
        *("--steps", "6", "--checkpoint_every", "3", "--validate_every", "2"),
    )
    train(recipe, tmp_path / "whole", device="cpu")
    run = tmp_path / "killed"
    assert processes.run(train_killed_after_step_4, recipe, run) == -signal.SIGKILL
    assert saved_steps(run) == [3]
    train(recipe, run, resume="auto", device="cpu")
    assert_identical(run, tmp_path / "whole")


KILLS = 2  # `python -m tests.hostile.kills` makes 60


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_killed_at_random_moments_ends_with_identical_weights(workers: int, tmp_path: Path) -> None:
    module = [sys.executable, "-W", "error", "-m", "tests.training.killing"]
    result = subprocess.run(
        [*module, str(tmp_path), str(KILLS), "0", str(workers)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\nkill") + result.stdout.startswith("kill") == KILLS, result.stdout
    killed = sorted(tmp_path.glob("killed-*"))
    assert killed
    for run in killed:
        assert_identical(run, tmp_path / "whole")


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in run.glob("checkpoints/step-*.pt"))


def assert_identical(run: Path, whole: Path) -> None:
    for kind in ("model", "best"):
        ours, theirs = (directory / kind / "model.safetensors" for directory in (run, whole))
        assert ours.read_bytes() == theirs.read_bytes(), kind
    assert metrics_of(run) == metrics_of(whole)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without measured times."""
    measured = ("images_per_second", "waiting")
    return [
        {name: value for name, value in line.items() if name not in measured}
        for line in read_metrics(run / "metrics.jsonl")
    ]
