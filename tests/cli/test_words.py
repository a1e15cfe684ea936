"""Places that nothing can be written to are refused before any work."""

import os
from pathlib import Path

import pytest

from caaseg.cli import main


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "no-model", "--dataset", "scenes"],
        ["data", "check", "camvid", "--root", "nowhere"],
        ["benchmark", "loader", "--root", "nowhere"],
        ["reproduce", "heads", "--dataset", "scenes", "--out", "grid"],
        ["demo", "--out", "out"],
    ],
)
def test_a_folder_is_no_file_for_the_numbers(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert main([*words, "--json", "taken"]) == 2
    assert capsys.readouterr().err == "caaseg: --json is 'taken'; expected the name of a file\n"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["reproduce", "heads", "--dataset", "scenes", "--out", "taken"], "--out"),
        (["demo", "--out", "taken"], "--out"),
        (["evaluate", "no-model", "--dataset", "cityscapes", "--submission", "taken"], "--submission"),
    ],
)
def test_a_file_is_no_folder_for_results(
    words: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("something")
    assert main(words) == 2
    assert f"{option} is 'taken', which is a file; expected a folder, there or not" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "something"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["evaluate", "no-model", "--dataset", "scenes", "--json", "locked/new/scores.json"], "--json"),
        (["evaluate", "no-model", "--dataset", "scenes", "--page", "locked/page.html"], "--page"),
        (["reproduce", "heads", "--dataset", "scenes", "--out", "locked/grid"], "--out"),
    ],
)
def test_what_may_not_be_written_to_is_said_before_any_work(
    words: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "locked").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place).name != "locked")  # to root nothing is forbidden
    assert main(words) == 2
    place = tmp_path / "locked"
    said = f"caaseg: {option} is {words[-1]!r}, but {place} may not be written to; give another place\n"
    assert capsys.readouterr().err == said
