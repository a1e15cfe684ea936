"""Training with several processes, or in several parts per step, gives the weights of one process and one part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from caaseg.training.metrics_log import read_metrics
from tests.processes import run_ranks
from tests.training.frozen import train_frozen

PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]

LOSSES = ("--loss.class_weights", "log", "--model.head", "encnet")  # losses per pixel, and one per image

# Lightning warns about modules in evaluation mode, which these tests want.
modules_in_eval_mode = pytest.mark.filterwarnings("ignore:Found .* in eval mode")


def assert_same_run(run: Path, expected: Path) -> None:
    weights, other = (load_file(directory / "model" / "model.safetensors") for directory in (run, expected))
    for name, tensor in other.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023
    ours, theirs = (read_metrics(directory / "metrics.jsonl") for directory in (run, expected))
    for line, expected_line in zip(ours, theirs, strict=True):
        if "loss" in expected_line:
            assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-4)
        else:
            assert line["val_mean_iou"] == pytest.approx(expected_line["val_mean_iou"], abs=0.01)


def train_and_write_seeds(directory: Path) -> None:
    seeds = train_frozen(directory / "ranks", *LOSSES)
    (directory / f"seeds-{os.environ['RANK']}.json").write_text(json.dumps(seeds))


@modules_in_eval_mode
def test_parts_of_a_step_and_two_processes_give_the_same_weights(tmp_path: Path) -> None:
    train_frozen(tmp_path / "one", *LOSSES)
    train_frozen(tmp_path / "parts", *LOSSES, "--accumulate", "4")
    assert_same_run(tmp_path / "parts", tmp_path / "one")
    assert run_ranks(train_and_write_seeds, tmp_path) == [0, 0]
    assert_same_run(tmp_path / "ranks", tmp_path / "one")
    # Dropout must differ between steps and between processes. A process also runs the model before its first step.
    seeds = [seed for rank in (0, 1) for seed in json.loads((tmp_path / f"seeds-{rank}.json").read_text())[1:]]
    assert len(seeds) == len(set(seeds)) == 8


def train_without_ddp(directory: Path) -> None:
    train_frozen(directory / "ranks", "--loss.class_weights", "log", "--cuda_graph", "true")


@modules_in_eval_mode
def test_gradients_averaged_after_a_captured_step_give_the_same_weights(tmp_path: Path) -> None:
    """On a CPU nothing is captured, but `cuda_graph` trains with `average_gradients` instead of DDP there, too."""
    train_frozen(tmp_path / "one", "--loss.class_weights", "log")
    assert run_ranks(train_without_ddp, tmp_path) == [0, 0]
    assert_same_run(tmp_path / "ranks", tmp_path / "one")


def train_in_new_process(out: Path, launcher: list[str], devices: int, *options: str) -> str:
    command = [*launcher, "tests.training.frozen", str(out), str(devices), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
@modules_in_eval_mode
@pytest.mark.parametrize("ohem", ["null", "0.3"])
def test_two_devices_give_the_weights_of_one(tmp_path: Path, ohem: str) -> None:
    train_frozen(tmp_path / "one", "--loss.ohem", ohem)
    messages = train_in_new_process(tmp_path / "two", PYTHON, 2, "--loss.ohem", ohem)
    assert "synchronized batch norm is not available on CPU" in messages
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@modules_in_eval_mode
def test_torchrun_with_accumulation_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    train_frozen(tmp_path / "one", "--loss.class_weights", "log")
    options = ["--accumulate", "2", "--loss.class_weights", "log"]
    train_in_new_process(tmp_path / "two", TORCHRUN, 1, *options)
    assert_same_run(tmp_path / "two", tmp_path / "one")
