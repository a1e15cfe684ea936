"""The demo: from the command to the page, repeated, and errors of its training processes."""

import json
import re
import resource
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from caaseg.api import train
from caaseg.cli import main
from caaseg.demo import RECIPES, run_demo, train_in_process
from caaseg.recipes import load_recipe, recipe_text
from tests.training.small import small_recipe


def test_the_two_recipes_differ_only_in_the_head() -> None:
    fcn, caa = (load_recipe(RECIPES[name]) for name in ("FCN", "CAA"))
    assert fcn.differences(caa) == {"model.head": ("fcn", "caa")}


def check_page(out: Path, numbers: dict[str, Any], images: int) -> None:
    """Check the finished report."""
    page = (out / "report.html").read_text()
    for model in ("FCN", "CAA"):
        scored = numbers["models"][model]
        assert scored["images"] == images
        assert scored["training_seconds"] > 0
        assert f"{100 * scored['mean_iou']:.1f}" in page
        assert (out / model.lower() / "report.html").is_file()
    assert len(numbers["finding"]) == 3
    assert all(sentence in page for sentence in numbers["finding"])
    assert page.count("<svg") == 2
    assert page.count('class="case"') == 5  # the photo and four scenes
    assert page.count("data:image/") == 4 + 20
    assert "are being trained" not in page
    assert re.findall(r'<(?:img|link|script)[^>]*(?:src|href)="(?!data:)', page) == []


def test_the_demo_writes_a_page_and_does_not_repeat_finished_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, messages, recipes = tmp_path / "demo", list[str](), dict[str, str]()
    for name in ("FCN", "CAA"):
        recipe = small_recipe("--model.head", name.lower())
        (tmp_path / f"{name}.yaml").write_text(recipe_text(recipe))
        recipes[name] = str(tmp_path / f"{name}.yaml")
        train(recipe, out / name.lower(), device="cpu")  # in this process, which has imported torch
    numbers = run_demo(out, recipes=recipes, device="cpu", log=messages.append)
    assert numbers is not None
    assert [message for message in messages if "training for" in message] == []
    check_page(out, numbers, images=6)

    written = (out / "report.html").stat().st_mtime_ns
    assert run_demo(out, recipes=recipes, device="cpu", log=messages.append) == numbers
    assert messages[-1] == "already finished"

    for name, shipped in RECIPES.items():  # as if the recipes of the demo had given these results
        (out / name.lower() / "recipe.yaml").write_text(recipe_text(load_recipe(shipped)))
    capsys.readouterr()
    assert main(["demo", "--out", str(out), "--device", "cpu", "--json", str(tmp_path / "numbers.json")]) == 0
    printed = capsys.readouterr().out
    assert "already finished" in printed
    assert f"report: {out / 'report.html'}" in printed
    assert json.loads((tmp_path / "numbers.json").read_text()) == numbers
    assert (out / "report.html").stat().st_mtime_ns == written


def test_the_shipped_model_is_in_the_report_before_the_training(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(line: str) -> None:
        if "on a sample photo" in line:
            raise StoppedError

    with pytest.raises(StoppedError):
        run_demo(tmp_path / "demo", device="cpu", log=stop)
    page = (tmp_path / "demo/report.html").read_text()
    assert page.count("data:image/") == 4  # photo, prediction, and attention twice
    assert all(name in page for name in ("Sky", "Building", "Tree", "danielbuechele, CC BY 2.0"))
    assert "are being trained" in page


@pytest.mark.slow
def test_the_demo_trains_both_models_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    arguments = ["demo", "--out", str(out), "--steps", "3", "--device", "cpu"]
    assert main([*arguments, "--json", str(tmp_path / "numbers.json")]) == 0
    assert "FCN: training for 3 steps" in capsys.readouterr().out
    check_page(out, json.loads((tmp_path / "numbers.json").read_text()), images=200)
    arguments[arguments.index("3")] = "4"
    assert main(arguments) == 2  # a finished demo with other settings is not repeated silently
    assert "steps was 3 and is 4" in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_shows_the_shipped_model_within_15_seconds(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "caaseg", "demo", "--out", str(tmp_path / "demo"), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        while not (tmp_path / "demo/report.html").exists():
            assert child.poll() is None
            time.sleep(0.1)
        child.terminate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # CPU time: a busy machine does not change it
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15


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
