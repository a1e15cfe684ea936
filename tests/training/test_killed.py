"""Runs that are killed at random moments, also while they write a checkpoint, end as if they had not been."""

import subprocess
import sys
from pathlib import Path

import pytest

from caaseg.training.metrics_log import read_metrics


@pytest.mark.parametrize(
    ("kills", "workers"),
    [(3, 0), pytest.param(20, 0, marks=pytest.mark.slow), pytest.param(20, 1, marks=pytest.mark.slow)],
)
def test_a_killed_run_ends_bit_identical(kills: int, workers: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.training.killing",
        str(tmp_path),
        str(kills),
        "0",
        str(workers),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\nkill") + result.stdout.startswith("kill") == kills, result.stdout
    killed = sorted(tmp_path.glob("killed-*"))
    assert killed
    for run in killed:
        for kind in ("model", "best"):
            ours, whole = (folder / kind / "model.safetensors" for folder in (run, tmp_path / "whole"))
            assert ours.read_bytes() == whole.read_bytes(), result.stdout
        assert measured(run) == measured(tmp_path / "whole")


def measured(run: Path) -> list[dict[str, object]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [
        {name: value for name, value in line.items() if name not in ("images_per_second", "waiting")} for line in lines
    ]
