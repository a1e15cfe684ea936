"""Several processes, and several parts of a step, give what one gives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from caaseg.data.datasets.scenes import Scenes
from caaseg.training.metrics_log import read_metrics
from caaseg.training.run import train
from tests.training.frozen import always_evaluate, partly_ignored
from tests.training.small import WORDS, small_recipe

PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29765", "-m"]


def trained(folder: Path, launcher: list[str], *words: str) -> dict[str, torch.Tensor]:
    command = [*launcher, "tests.training.frozen", "train", "scenes/caa_resnet18", "--device", "cpu", *WORDS]
    recipe = ["--batch_size", "8", "--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--model.aux", "true"]
    result = subprocess.run(
        [*command, *recipe, "--out", str(folder), *words], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    if "--devices" in words:
        assert "synchronized batch norm is not available on CPU" in result.stderr
    return load_file(folder / "model" / "model.safetensors")


def assert_same(folder: Path, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023
    ours, theirs = (read_metrics(folder / run / "metrics.jsonl") for run in ("one", "other"))
    assert len(ours) == len(theirs)
    for line, other in zip(ours, theirs, strict=True):
        if "loss" in line:
            assert other["loss"] == pytest.approx(line["loss"], rel=1e-4)
        else:
            assert other["val_mean_iou"] == pytest.approx(line["val_mean_iou"], abs=0.01)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # as this test wants it
def test_accumulation_gives_what_one_part_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (nn.BatchNorm2d, nn.Dropout):
        monkeypatch.setattr(part, "train", always_evaluate)
    monkeypatch.setattr(Scenes, "__getitem__", partly_ignored)
    words = ["--batch_size", "8", "--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--model.aux", "true"]
    for folder, parts in (("one", "1"), ("other", "4")):
        train(small_recipe(*words, "--accumulate", parts), tmp_path / folder, device="cpu")
    expected, found = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("one", "other"))
    assert_same(tmp_path, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ohem", ["null", "0.3"])
def test_two_processes_give_what_one_gives(tmp_path: Path, ohem: str) -> None:
    expected = trained(tmp_path / "one", PYTHON, "--loss.ohem", ohem)
    words = ["--loss.ohem", ohem, "--loss.class_weights", "none", "--devices", "2"]
    assert_same(tmp_path, trained(tmp_path / "other", PYTHON, *words), expected)


@pytest.mark.slow
def test_two_processes_of_torchrun_with_accumulation_give_what_one_gives(tmp_path: Path) -> None:
    expected = trained(tmp_path / "one", PYTHON, "--loss.class_weights", "log")
    words = ["--accumulate", "2", "--loss.class_weights", "log"]
    assert_same(tmp_path, trained(tmp_path / "other", TORCHRUN, *words), expected)
