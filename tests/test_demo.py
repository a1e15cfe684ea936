"""The demo: from the command to the page, repeated, and errors of its training processes."""

import json
import re
import signal
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from caaseg.cli import main
from caaseg.demo import RECIPES, train_in_process
from caaseg.recipes import load_recipe, recipe_text
from tests.training.small import small_recipe


def test_the_two_recipes_differ_only_in_the_head() -> None:
    fcn, caa = (load_recipe(RECIPES[name]) for name in ("FCN", "CAA"))
    assert fcn.differences(caa) == {"model.head": ("fcn", "caa")}


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_command_writes_a_page_and_does_not_repeat_finished_work(
    small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if small:
        for name, head in (("FCN", "fcn"), ("CAA", "caa")):
            (tmp_path / f"{head}.yaml").write_text(recipe_text(small_recipe("--model.head", head)))
            monkeypatch.setitem(RECIPES, name, str(tmp_path / f"{head}.yaml"))
    out = tmp_path / "demo"
    words = ["demo", "--out", str(out), "--steps", "3", "--device", "cpu"]
    assert main([*words, "--json", str(tmp_path / "numbers.json")]) == 0
    printed = capsys.readouterr().out
    assert f"report: {out / 'report.html'}" in printed
    assert "FCN: training for 3 steps" in printed

    numbers = json.loads((tmp_path / "numbers.json").read_text())
    page = (out / "report.html").read_text()
    for model in ("FCN", "CAA"):
        scored = numbers["models"][model]
        assert scored["images"] == (6 if small else 200)
        assert scored["training_seconds"] > 0
        assert f"{100 * scored['mean_iou']:.1f}" in page
        assert (out / model.lower() / "report.html").is_file()
    assert len(numbers["finding"]) == 3
    assert all(sentence in page for sentence in numbers["finding"])
    assert page.count("<svg") == 2
    assert page.count('class="case"') == 4
    assert page.count("data:image/") == 20
    assert re.findall(r'<(?:img|link|script)[^>]*(?:src|href)="(?!data:)', page) == []

    written = (out / "report.html").stat().st_mtime_ns
    assert main([*words, "--json", str(tmp_path / "again.json")]) == 0
    assert "already finished" in capsys.readouterr().out
    assert json.loads((tmp_path / "again.json").read_text()) == numbers
    assert (out / "report.html").stat().st_mtime_ns == written
    words[words.index("3")] = "4"
    assert main(words) == 2  # a finished demo with other settings is not repeated silently
    assert "steps was 3 and is 4" in capsys.readouterr().err


def test_errors_of_a_training_process_reach_the_parent(tmp_path: Path) -> None:
    recipe = small_recipe()
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    receiver, sender = Pipe(duplex=False)
    before, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    try:
        train_in_process(recipe.replace(steps=7), tmp_path, "cpu", threads, sender)
    finally:
        signal.signal(signal.SIGINT, before)
    error = receiver.recv()
    assert isinstance(error, ValueError)
    assert "the run has different settings: steps was 6 and is 7; use the same, or another --out" in str(error)


def test_a_training_process_stops_with_a_checkpoint_when_the_parent_is_gone(tmp_path: Path) -> None:
    recipe = small_recipe("--steps", "20", "--validate_every", "20", "--checkpoint_every", "20")
    receiver, sender = Pipe(duplex=False)
    receiver.close()
    before = signal.getsignal(signal.SIGINT)
    try:
        train_in_process(recipe, tmp_path, "cpu", torch.get_num_threads(), sender)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000011.pt"]
