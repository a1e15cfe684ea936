"""Runner of a grid: from the command to the table, stopped, killed, resumed, and run by two commands at once."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from caaseg.cli import main
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone
from caaseg.reproduce import runner
from caaseg.reproduce.grid import plan_grid
from caaseg.training.metrics_log import read_metrics
from tests import processes
from tests.training.killing import die_while_saving
from tests.training.small import SMALL_ARGUMENTS

SCENES = ("--dataset", "scenes", "--device", "cpu", *SMALL_ARGUMENTS, "--data.scenes.length", "3")
TWO_STEPS = ("--steps", "2", "--checkpoint_every", "1", "--validate_every", "2")
TABLE2 = ("reproduce", "table2", "--rows", "axial,caa", "--seeds", "2", *SCENES, *TWO_STEPS)


def cell(directory: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "cells" / f"{name}.json").read_text())
    return content


def scores(directory: Path) -> list[list[float | None]]:
    return [line["scores"] for line in json.loads((directory / "table2.json").read_text())["lines"]]


def times(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (directory / "cells").iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a finished grid, and the output of the command."""
    directory = tmp_path_factory.mktemp("reproduce") / "finished"
    with redirect_stdout(io.StringIO()) as output:
        assert main([*TABLE2, "--out", str(directory)]) == 0
    return directory, output.getvalue()


@pytest.fixture
def copied(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "grid"))


def test_a_grid_from_the_command_line_to_the_table(finished: tuple[Path, str]) -> None:
    directory, output = finished
    names = [f"{row}-seed{seed}" for seed in (0, 1) for row in ("axial", "caa")]
    cells = [line.partition(":")[0] for line in output.splitlines() if "-seed" in line.partition(":")[0]]
    assert cells[:4] == names  # all rows of seed 0, then of seed 1
    for name in names:
        record = cell(directory, name)
        assert f"{record['row']}-seed{record['seed']}" == name
        assert record["recipe"]["model"]["head"] == record["row"]
        assert record["recipe"]["seed"] == record["seed"]
        assert record["recipe"]["steps"] == 2
        assert record["peak_gpu_bytes"] is None
        assert record["training_seconds"] > 0
        assert record["versions"]["torch"]
        (score,) = record["scores"]
        assert (score["split"], score["scales"], score["flip"], score["images"]) == ("val", [1.0], False, 3)
        assert len(score["iou"]) == 8
        # The last validation scores the final model on the same images.
        assert score["mean_iou"] == record["val_mean_iou"]
    content = json.loads((directory / "table2.json").read_text())
    for line in content["lines"]:
        assert line["scores"] == [
            cell(directory, f"{line['row']}-seed{seed}")["scores"][0]["mean_iou"] for seed in (0, 1)
        ]
        assert "images_per_second" not in line["cost"]  # not reported for a CPU
    first, caa = content["lines"]
    expected = stats.ttest_rel(caa["scores"], first["scores"]).confidence_interval()
    found = caa["difference"]
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert (caa["paper"], caa["paper_std"]) == (51.06, 0.2)
    page = (directory / "table2.md").read_text()
    assert f"| channelized axial attention | {100 * caa['mean']:.2f} ± {100 * caa['std']:.2f} (n 2) | 51.06" in page
    for text in (page, output):
        assert "Our numbers and the paper's are on different data" in text
        assert "split val, evaluated after the last step; trained on train with recipe scenes/caa_resnet18" in text
    assert (directory / "table2.png").read_bytes()[:4] == b"\x89PNG"
    assert (directory / "runs" / "caa-seed1" / "model" / "model.safetensors").is_file()


def run_killed_in_checkpoint(number: int, arguments: list[str]) -> None:
    """Run a command that is killed while it writes a checkpoint, counted from 1."""
    torch.save = die_while_saving(torch.save, after=number - 1)
    processes.exit_with_command(arguments)


def test_a_killed_grid_resumes_to_the_same_table(finished: tuple[Path, str], tmp_path: Path) -> None:
    """The second cell is killed while it writes its second checkpoint."""
    directory = tmp_path / "killed"
    arguments = [*TABLE2, "--seeds", "1", "--out", str(directory)]
    assert processes.run(run_killed_in_checkpoint, 4, arguments) == -signal.SIGKILL
    assert list(times(directory)) == ["axial-seed0.json"]
    checkpoints = [path.name for path in (directory / "runs" / "caa-seed0" / "checkpoints").glob("step-*")]
    assert checkpoints == ["step-00000001.pt"]
    before = times(directory)

    assert main(arguments) == 0
    assert times(directory)["axial-seed0.json"] == before["axial-seed0.json"]
    assert cell(directory, "axial-seed0")["training_seconds"] > 0
    assert cell(directory, "caa-seed0")["training_seconds"] is None  # unknown for a resumed run
    assert scores(directory) == [found[:1] for found in scores(finished[0])]
    assert len(times(directory)) == 2
    for name in times(directory):
        ours, theirs = (cell(grid, Path(name).stem)["scores"][0] for grid in (directory, finished[0]))
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_finished_cells_are_not_run_again_even_without_their_runs(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "runs")
    before = times(copied)
    (copied / "table2.md").unlink()
    arguments = [*TABLE2, "--out", str(copied), "--data.workers", "1"]  # does not change the results
    assert main([*arguments, "--json", "-"]) == 0
    assert times(copied) == before
    assert not (copied / "runs").exists()
    assert (copied / "table2.md").is_file()
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((copied / "table2.json").read_text())
    assert "cells are left" not in err


def test_cells_of_another_recipe_are_rejected_before_anything_runs(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "cells" / "axial-seed0.json").unlink()
    assert main([*TABLE2, "--out", str(copied), "--optimizer.lr", "0.5"]) == 2
    error = capsys.readouterr().err
    changed = "optimizer.lr was 0.002 and is 0.5"
    assert f"caa-seed0.json: the cell was trained with different settings: {changed}; use the same" in error
    assert "another --out, or delete the file and its run to train it again" in error
    assert not (copied / "cells" / "axial-seed0.json").exists()

    (copied / "cells" / "caa-seed1.json").write_text('{"recipe": ')
    assert main([*TABLE2, "--out", str(copied)]) == 2
    assert "caa-seed1.json: not the file of a cell (" in capsys.readouterr().err


def test_another_protocol_needs_no_training(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TABLE2, "--out", str(copied), "--rows", "caa", "--split", "test", "--multi-scale"]
    arguments += ["--scales", "0.5,1", "--keep-runs", "false"]
    trained = {path: path.stat().st_mtime_ns for path in (copied / "runs").glob("*/metrics.jsonl")}
    assert main([*arguments, "--seeds", "1", "--keep-runs", "true"]) == 0
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    record = cell(copied, "caa-seed0")
    assert [(s["split"], s["scales"], s["flip"]) for s in record["scores"]] == [
        ("val", [1.0], False),
        ("test", [1.0], False),
        ("test", [0.5, 1.0], True),
    ]
    page = (copied / "table2.md").read_text()
    assert "| channelized axial attention, several scales, flipped |" in page
    assert "| axial attention" not in page  # a row that was not selected

    assert main(arguments) == 0
    assert sorted(path.name for path in (copied / "runs").iterdir()) == ["axial-seed0", "axial-seed1"]
    capsys.readouterr()
    assert main([*arguments, "--scales", "0.5"]) == 2
    error = capsys.readouterr().err
    assert "but not on test at [0.5], and" in error
    assert "has no model any more; use one of its protocols, or delete the file to train it again" in error


def test_no_cell_is_started_that_would_exceed_the_time_limit(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The duration is estimated from finished cells of the same row."""
    (copied / "cells" / "caa-seed1.json").unlink()
    shutil.rmtree(copied / "runs" / "caa-seed1")
    for name, seconds in (("caa-seed0", 1000.0), ("axial-seed1", 50_000.0)):
        path = copied / "cells" / f"{name}.json"
        path.write_text(json.dumps({**cell(copied, name), "training_seconds": seconds}))
    arguments = [*TABLE2, "--out", str(copied), "--limit-minutes"]
    assert main([*arguments, "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"caa-seed1 takes about 1100 s, and 1[12]\d s are left", out)
    assert "the time is up: 1 of 4 cells are left; run the same command to continue" in out
    assert "(n 1 of 2)" in (copied / "table2.md").read_text()
    assert main([*arguments, "30"]) == 0
    assert "takes about" not in capsys.readouterr().out
    assert main([*arguments, "0"]) == 2
    assert "--limit-minutes is 0; expected greater than 0" in capsys.readouterr().err


def test_the_rest_of_a_run_is_estimated_from_the_steps_that_its_epochs_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = SCENES.index("--steps")
    small = (*SCENES[:steps], *SCENES[steps + 2 :])
    arguments = ["reproduce", "table2", "--rows", "axial", "--seeds", "2", *small, "--epochs", "4"]
    arguments += ["--checkpoint_every", "1", "--validate_every", "6", "--out", str(tmp_path)]
    assert main(arguments) == 0
    first = cell(tmp_path, "axial-seed0")
    assert (first["recipe"]["epochs"], first["steps"]) == (4, 6)  # 4 epochs of 3 images in batches of 2
    path = tmp_path / "cells" / "axial-seed0.json"
    path.write_text(json.dumps({**first, "training_seconds": None, "images_per_second": 1e-3}))
    (tmp_path / "cells" / "axial-seed1.json").unlink()
    run = tmp_path / "runs" / "axial-seed1"
    shutil.rmtree(run / "model")
    newest = sorted((run / "checkpoints").iterdir())
    assert newest[-1].name == "step-00000006.pt"
    newest[-1].unlink()  # as if it was killed after step 5
    capsys.readouterr()
    assert main([*arguments, "--limit-minutes", "1"]) == 0
    # 1.1 times a sixth of 6 steps of 2 images, each taking 1,000 s.
    assert re.search(r"axial-seed1 takes about 220\d s, and \d+ s are left", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("in_training", "in_scoring"),
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param(signal.SIGINT, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_a_grid_in_training_and_in_scoring_and_it_resumes(
    in_training: signal.Signals,
    in_scoring: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "grid" / "runs" / "fcn-seed0"

    def run_grid_with_signal(number: signal.Signals, *, scoring: bool) -> int:
        """Run the grid, and send a signal in the fifth training step, or in the fifth forward pass of scoring."""
        passes = 0

        def count(module: nn.Module, inputs: object, output: object) -> None:
            nonlocal passes
            if isinstance(module, TimmBackbone) and ((run / "model").is_dir() if scoring else module.training):
                passes += 1
                if passes == 5:
                    os.kill(os.getpid(), number)

        hook = register_module_forward_hook(count)
        try:
            return main(arguments)
        finally:
            hook.remove()

    arguments = ["reproduce", "heads", *SCENES, "--data.scenes.length", "9", "--rows", "fcn", "--steps", "12"]
    arguments += ["--out", str(tmp_path / "grid"), "--checkpoint_every", "100", "--validate_every", "100"]
    arguments += ["--split", "test"]  # validation during training scores val, which would be reused
    handlers = [signal.getsignal(number) for number in (in_training, in_scoring)]
    assert run_grid_with_signal(in_training, scoring=False) == 128 + in_training
    assert [signal.getsignal(number) for number in (in_training, in_scoring)] == handlers
    assert "stopped: 1 of 1 cells are left; run the same command to continue" in capsys.readouterr().out
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005.pt"]
    assert run_grid_with_signal(in_scoring, scoring=True) == 128 + in_scoring
    assert (run / "model").is_dir()
    assert not (tmp_path / "grid" / "cells").exists()
    assert main(arguments) == 0
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == [10, 12]
    assert "This is not a table of the paper" in (tmp_path / "grid" / "heads.md").read_text()


@pytest.mark.slow
def test_two_commands_run_different_rows_in_one_directory_at_the_same_time(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    directory = tmp_path / "shared"
    arguments = [*TABLE2, "--seeds", "1", "--out", str(directory)]
    commands = [processes.start(processes.exit_with_command, [*arguments, "--rows", row]) for row in ("axial", "caa")]
    assert processes.join(*commands) == [0, 0]
    assert set(times(directory)) == {"axial-seed0.json", "caa-seed0.json"}
    assert {path.name for path in directory.iterdir()} == {"cells", "runs", "table2.md", "table2.json", "table2.png"}
    assert len(scores(directory)) == 1  # the report of the last command
    assert main(arguments) == 0
    assert scores(directory) == [found[:1] for found in scores(finished[0])]


def test_a_cell_is_trained_on_the_requested_device_and_not_on_another_one(tmp_path: Path) -> None:
    grid = plan_grid("heads", tmp_path, dataset="scenes", rows=["fcn"], overrides=TWO_STEPS)
    with pytest.raises(CaasegError, match="device is mps, which this machine does not have; use cpu"):
        runner.run_grid(grid, device=torch.device("mps"), origin={})


@pytest.mark.parametrize("other_runs", [True, False])
def test_a_cell_records_whether_it_was_alone(other_runs: bool, copied: Path) -> None:
    ended = subprocess.Popen([sys.executable, "--version"], stdout=subprocess.DEVNULL)
    ended.wait()
    marker = copied / f"{runner.MARKER_PREFIX}{os.getppid() if other_runs else ended.pid}"
    marker.touch()
    elsewhere = copied / f"{runner.MARKER_PREFIX}lan.4242"  # of a machine whose name starts with the name of this one
    elsewhere.touch()
    (copied / "cells" / "caa-seed1.json").unlink()  # its run is finished, and scored again
    assert main([*TABLE2, "--out", str(copied)]) == 0
    assert cell(copied, "caa-seed0")["alone"]
    assert cell(copied, "caa-seed1")["alone"] is not other_runs
    assert marker.exists() is other_runs
    assert elsewhere.exists()
    assert ("trained at the same time as others" in (copied / "table2.md").read_text()) is other_runs
