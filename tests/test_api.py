"""A run ends with its report, in one process and in several, and a missing report is made up for."""

import subprocess
import sys
from pathlib import Path

import pytest

import caaseg
from caaseg.cli import main
from caaseg.recipes import default_folder
from tests.training.small import WORDS, small_recipe


def test_a_run_ends_with_a_report_and_a_missing_or_old_one_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(run), *WORDS]
    assert main(words) == 0
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "<h1>caa on test_resnet, scenes</h1>" in page
    assert "evaluated on all 6 images of split val" in page
    assert "val-0-000000" in page
    assert page.count('class="case"') == 6

    made = (run / "report.html").stat().st_mtime_ns
    assert main([*words, "--resume", "auto"]) == 0  # all is there
    assert (run / "report.html").stat().st_mtime_ns == made
    (run / "report.html").unlink()
    assert main([*words, "--resume", "auto"]) == 0
    again = (run / "report.html").stat().st_mtime_ns
    assert again > made
    assert main([*words, "--resume", str(run / "checkpoints" / "step-00000003.pt")]) == 0  # another model
    assert (run / "report.html").stat().st_mtime_ns > again


def test_a_run_that_was_stopped_has_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    recipe = small_recipe("--steps", "24", "--checkpoint_every", "100", "--validate_every", "24")

    def stop(progress: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert not caaseg.train(recipe, tmp_path / "run", device="cpu", progress=stop).finished
    assert not (tmp_path / "run" / "report.html").exists()


def test_without_a_folder_a_run_goes_where_the_command_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder("camvid/caa_resnet50") == Path("runs/camvid-caa_resnet50")
    assert default_folder(Path("../mine/try.yaml")) == Path("runs/mine-try")
    monkeypatch.chdir(tmp_path)
    result = caaseg.train(small_recipe().replace(steps=1), device="cpu")
    assert result.run == Path("runs/scenes-caa_test_resnet")
    assert (tmp_path / "runs" / "scenes-caa_test_resnet" / "report.html").is_file()


def test_of_several_processes_one_writes_the_report(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29767", "-m"]
    words = ["caaseg", "train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *WORDS]
    done = subprocess.run(
        [*launcher, *words, "--batch_size", "4"], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("report: ") == 1
    assert "evaluated on all 6 images of split val" in (tmp_path / "run" / "report.html").read_text()
