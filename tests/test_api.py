"""A run ends with its report, in one process and in several; a missing or old report is written again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import caaseg
from caaseg.api import default_run_directory
from caaseg.cli import main
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import Sample
from tests.processes import exit_with_command, run_ranks
from tests.training.small import SMALL_ARGUMENTS, small_recipe


def test_a_run_ends_with_a_report_and_a_missing_or_old_one_is_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(run), *SMALL_ARGUMENTS]
    arguments += ["--steps", "2", "--checkpoint_every", "1", "--validate_every", "2"]
    assert main(arguments) == 0
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "<h1>caa on test_resnet, scenes</h1>" in page
    assert "evaluated on all 6 images of split val" in page
    assert "val-0-000000" in page
    assert page.count('class="case"') == 6

    made = (run / "report.html").stat().st_mtime_ns
    assert main([*arguments, "--resume", "auto"]) == 0  # the report is up to date
    assert (run / "report.html").stat().st_mtime_ns == made
    (run / "report.html").unlink()
    assert main([*arguments, "--resume", "auto"]) == 0
    again = (run / "report.html").stat().st_mtime_ns
    assert again > made
    assert main([*arguments, "--resume", str(run / "checkpoints" / "step-00000001.pt")]) == 0  # another model
    assert (run / "report.html").stat().st_mtime_ns > again


def test_a_run_that_was_stopped_has_no_report(tmp_path: Path) -> None:
    recipe = small_recipe("--steps", "14", "--checkpoint_every", "100", "--validate_every", "14")

    def stop(progress: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert not caaseg.train(recipe, tmp_path / "run", device="cpu", progress=stop).finished
    assert not (tmp_path / "run" / "report.html").exists()


class TwoColors:
    """A dataset without a palette."""

    classes = ("dark", "bright")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        label = (torch.arange(64 * 64).view(64, 64) % 16 < 8).byte()
        return Sample(label.mul(200).expand(3, 64, 64), label, f"sample {index}")


def test_a_dataset_of_ones_own_needs_no_palette(tmp_path: Path) -> None:
    data: Any = TwoColors()
    result = caaseg.train(small_recipe("--steps", "1"), tmp_path / "run", data=(data, data), device="cpu")
    assert result.finished
    assert caaseg.load_model(tmp_path / "run").config.palette == distinct_colors(2)
    assert "dark" in (tmp_path / "run" / "report.html").read_text()


def test_the_default_run_directory_has_the_name_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_run_directory("camvid/caa_resnet50") == Path("runs/camvid-caa_resnet50")
    assert default_run_directory(Path("../mine/try.yaml")) == Path("runs/mine-try")
    monkeypatch.chdir(tmp_path)
    result = caaseg.train(small_recipe().replace(steps=1), device="cpu")
    assert result.run == Path("runs/scenes-caa_test_resnet")
    assert (tmp_path / "runs" / "scenes-caa_test_resnet" / "report.html").is_file()


def test_one_of_several_processes_writes_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    assert run_ranks(exit_with_command, [*arguments, "--batch_size", "4", "--steps", "2"]) == [0, 0]
    assert capfd.readouterr().out.count("report: ") == 1
    assert "evaluated on all 6 images of split val" in (tmp_path / "run" / "report.html").read_text()
