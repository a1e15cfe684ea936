"""Measurement of time and memory against the number of groups."""

import json
from pathlib import Path

import pytest
import torch

from caaseg.cli import main
from caaseg.reproduce.groups import measure_groups, write_groups


def test_groups_are_measured_and_written(tmp_path: Path) -> None:
    counts: list[tuple[int, int]] = []
    measurements = measure_groups(
        torch.device("cpu"), sizes=[(1, 5, 7)], channels=8, seconds=0.001, progress=lambda *count: counts.append(count)
    )
    assert counts == [(k, 6) for k in range(1, 7)]
    write_groups(measurements, tmp_path, {})
    content = json.loads((tmp_path / "groups.json").read_text())
    found = [(m["implementation"], m["groups"], m["agrees"]) for m in content["measurements"]]
    assert found == [
        ("axial", None, True),
        ("factorised", None, True),
        ("grouped", 1, True),
        ("grouped", 2, True),
        ("grouped", 4, True),
        ("loop", None, True),
    ]
    page = (tmp_path / "groups.md").read_text()
    assert "| 1 x 5 x 7 | factorised | 1.00 | 1.00 |" in page
    assert (tmp_path / "groups.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_command_measures_the_groups(tmp_path: Path) -> None:
    assert main(["reproduce", "groups", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"groups.json", "groups.md", "groups.png"}
