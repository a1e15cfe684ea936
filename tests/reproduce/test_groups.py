"""Measurement of time and memory against the number of groups."""

import json
from pathlib import Path

import pytest

from caaseg.cli import main
from caaseg.reproduce import groups


def test_groups_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.SIZES, "cpu", ((1, 5, 7),))
    measure = groups.measure_groups
    monkeypatch.setattr(groups, "measure_groups", lambda *a, **k: measure(*a, **k, channels=8, seconds=0.001))
    assert main(["reproduce", "groups", "--out", str(tmp_path), "--device", "cpu"]) == 0
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
