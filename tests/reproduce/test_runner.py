"""A grid of runs: end to end, stopped, killed and gone on with, kept, and run by two commands at once."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import caaseg.cli.reproduce as command
from caaseg.cli import main
from caaseg.reproduce import runner as grid_run
from caaseg.reproduce.report import _cost
from caaseg.training.conductor import Progress
from caaseg.training.metrics_log import read_metrics
from tests.training.small import WORDS

SCENES = ("--dataset", "scenes", "--device", "cpu", *WORDS)
TABLE2 = ("reproduce", "table2", "--seeds", "2", *SCENES, "--steps", "4", "--checkpoint_every", "2")


def cell(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "cells" / f"{name}.json").read_text())
    return content


def scores(folder: Path) -> list[list[float | None]]:
    return [line["scores"] for line in json.loads((folder / "table2.json").read_text())["lines"]]


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished grid, and what the command printed."""
    folder = tmp_path_factory.mktemp("reproduce") / "whole"
    with redirect_stdout(io.StringIO()) as said:
        assert main([*TABLE2, "--out", str(folder)]) == 0
    return folder, said.getvalue()


@pytest.fixture
def copied(whole: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "grid"))


def test_a_grid_from_the_command_line_to_the_table(whole: tuple[Path, str]) -> None:
    folder, said = whole
    names = [f"{row}-seed{seed}" for seed in (0, 1) for row in ("axial", "axial_se", "caa")]
    assert [line.partition(":")[0] for line in said.splitlines()[:6]] == names  # seed by seed
    for name in names:
        record = cell(folder, name)
        assert f"{record['row']}-seed{record['seed']}" == name
        assert record["recipe"]["model"]["head"] == record["row"]
        assert record["recipe"]["seed"] == record["seed"]
        assert record["recipe"]["steps"] == 4
        assert record["peak_gpu_bytes"] is None
        assert record["training_seconds"] > 0
        assert record["versions"]["torch"]
        (score,) = record["scores"]
        assert (score["split"], score["scales"], score["flip"], score["images"]) == ("val", [1.0], False, 6)
        assert len(score["iou"]) == 8
        # What training scored last is the final model, on the same images.
        assert score["mean_iou"] == record["val_mean_iou"]
    content = json.loads((folder / "table2.json").read_text())
    for line in content["lines"]:
        assert line["scores"] == [cell(folder, f"{line['row']}-seed{seed}")["scores"][0]["mean_iou"] for seed in (0, 1)]
        assert "images_per_second" not in line["cost"]  # of a CPU that others use too
    first, _, caa = content["lines"]
    expected = stats.ttest_rel(caa["scores"], first["scores"]).confidence_interval()
    found = caa["difference"]
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert (caa["paper"], caa["paper_deviation"]) == (51.06, 0.2)
    page = (folder / "table2.md").read_text()
    assert (
        f"| channelized axial attention | {100 * caa['mean']:.2f} ± {100 * caa['deviation']:.2f} (n 2) | 51.06" in page
    )
    for text in (page, said):
        assert "Ours and the paper's numbers are of different data" in text
        assert "split val, scored after the last step; trained on train by recipe scenes/caa_resnet18" in text
    assert (folder / "table2.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "runs" / "caa-seed1" / "model" / "model.safetensors").is_file()


def test_a_killed_grid_goes_on_to_the_same_table(whole: tuple[Path, str], tmp_path: Path) -> None:
    """SIGKILL comes in the second cell, while it writes its second checkpoint."""
    folder = tmp_path / "killed"
    words = [*TABLE2, "--rows", "axial,caa", "--out", str(folder)]
    program = f"""
import os, signal, torch
import caaseg.cli.reproduce as command
from caaseg.cli import main
torch.set_num_threads(1)
save, saved = torch.save, []
def save_and_die(state, path):
    save(state, path)
    saved.append(path)
    if len(saved) == 4:
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_and_die
main({words!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list(times(folder)) == ["axial-seed0.json"]
    kept = [path.name for path in (folder / "runs" / "caa-seed0" / "checkpoints").glob("step-*")]
    assert kept == ["step-00000002.pt"]
    before = times(folder)

    assert main(words) == 0
    assert times(folder)["axial-seed0.json"] == before["axial-seed0.json"]
    assert cell(folder, "caa-seed0")["training_seconds"] is None  # nobody timed the whole of it
    assert cell(folder, "caa-seed1")["training_seconds"] > 0
    assert scores(folder) == scores(whole[0])[::2]
    assert len(times(folder)) == 4
    for name in times(folder):
        ours, theirs = (cell(place, Path(name).stem)["scores"][0] for place in (folder, whole[0]))
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_finished_cells_are_not_run_again_even_without_their_runs(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "runs")
    before = times(copied)
    (copied / "table2.md").unlink()
    words = [*TABLE2, "--out", str(copied), "--data.workers", "1"]  # which changes nothing that is learned
    assert main([*words, "--json", "-"]) == 0
    assert times(copied) == before
    assert not (copied / "runs").exists()
    assert (copied / "table2.md").is_file()
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((copied / "table2.json").read_text())
    assert "cells are left" not in err


def test_cells_of_another_recipe_are_refused_before_anything_is_run(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "cells" / "axial-seed0.json").unlink()
    assert main([*TABLE2, "--out", str(copied), "--optimizer.lr", "0.5"]) == 2
    said = capsys.readouterr().err
    assert (
        "axial_se-seed0.json: the cell was trained otherwise: optimizer.lr was 0.002 and is 0.5; give the same" in said
    )
    assert "another --out, or remove the file and its run to train it again" in said
    assert not (copied / "cells" / "axial-seed0.json").exists()

    (copied / "cells" / "caa-seed1.json").write_text('{"recipe": ')
    assert main([*TABLE2, "--out", str(copied)]) == 2
    assert "caa-seed1.json: not the file of a cell (" in capsys.readouterr().err


def test_another_way_of_scoring_needs_no_training(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TABLE2, "--out", str(copied), "--rows", "axial,caa", "--split", "test", "--multi-scale"]
    words += ["--scales", "0.5,1", "--keep-runs", "false"]
    trained = {path: path.stat().st_mtime_ns for path in (copied / "runs").glob("*/metrics.jsonl")}
    assert main([*words, "--seeds", "1", "--keep-runs", "true"]) == 0
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    record = cell(copied, "caa-seed0")
    assert [(s["split"], s["scales"], s["flip"]) for s in record["scores"]] == [
        ("val", [1.0], False),
        ("test", [1.0], False),
        ("test", [0.5, 1.0], True),
    ]
    page = (copied / "table2.md").read_text()
    assert "| channelized axial attention, several scales, flipped |" in page
    assert "squeeze" not in page.partition("\n\n- ")[0].partition("\n\n")[2]  # a row that was not asked for

    assert main(words) == 0
    assert sorted(path.name for path in (copied / "runs").iterdir()) == ["axial_se-seed0", "axial_se-seed1"]
    capsys.readouterr()
    assert main([*words, "--scales", "0.5"]) == 2
    said = capsys.readouterr().err
    assert "but not on test at [0.5], and its model is gone from" in said
    assert "ask for what it has, or remove the file to train it again" in said


def test_no_cell_is_started_that_would_not_be_finished_in_time(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("caa-seed0", "caa-seed1"):
        (copied / "cells" / f"{name}.json").unlink()
        shutil.rmtree(copied / "runs" / name)
    path = copied / "cells" / "axial-seed1.json"
    path.write_text(json.dumps({**cell(copied, "axial-seed1"), "training_seconds": 1000.0}))
    words = [*TABLE2, "--out", str(copied), "--limit-minutes"]
    assert main([*words, "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"caa-seed0 takes about 1100 s, and 1[12]\d s are left", out)
    assert "the time is up: 2 of 6 cells are left; run the same command to continue" in out
    assert "| channelized axial attention | not run yet |" in (copied / "table2.md").read_text()
    assert main([*words, "30"]) == 0  # of its own row there is a shorter one, once it is finished
    assert "takes about" not in capsys.readouterr().out
    assert main([*words, "0"]) == 2
    assert "--limit-minutes is 0; expected a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_grid_in_training_and_in_scoring_and_it_goes_on(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*given: Any, **options: Any) -> None:
        os.kill(os.getpid(), number)

    @contextmanager
    def signalling(console: object) -> Iterator[Callable[[Progress], None]]:
        yield stop

    words = ["reproduce", "heads", *SCENES, "--rows", "fcn", "--steps", "14", "--checkpoint_every", "100"]
    words += ["--out", str(tmp_path / "grid"), "--validate_every", "100"]
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(command, "training_bars", signalling)
        assert main(words) == 128 + number
    assert signal.getsignal(number) == before
    assert "stopped: 1 of 1 cells are left; run the same command to continue" in capsys.readouterr().out
    run = tmp_path / "grid" / "runs" / "fcn-seed0"
    (kept,) = (run / "checkpoints").iterdir()
    assert kept.name == "step-00000012.pt"
    with monkeypatch.context() as patch:
        patch.setattr(grid_run, "evaluate", stop)
        assert main(words) == 128 + number
    assert (run / "model").is_dir()
    assert not (tmp_path / "grid" / "cells").exists()
    assert main(words) == 0
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == [10, 14]
    assert "This is not a table of the paper" in (tmp_path / "grid" / "heads.md").read_text()


def test_two_commands_run_different_rows_in_one_folder_at_the_same_time(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    words = [*TABLE2, "--seeds", "1", "--out", str(folder)]
    program = "import sys, torch; from caaseg.cli import main; torch.set_num_threads(1); sys.exit(main(sys.argv[1:]))"
    commands = [
        subprocess.Popen([sys.executable, "-c", program, *words, "--rows", row], stdout=subprocess.DEVNULL)
        for row in ("axial", "caa")
    ]
    assert [command.wait() for command in commands] == [0, 0]
    assert set(times(folder)) == {"axial-seed0.json", "caa-seed0.json"}
    assert {path.name for path in folder.iterdir()} == {"cells", "runs", "table2.md", "table2.json", "table2.png"}
    assert len(scores(folder)) == 1  # the report of whoever was last
    assert main([*words, "--rows", "axial,caa"]) == 0
    assert scores(folder) == [found[:1] for found in scores(whole[0])[::2]]


@pytest.mark.parametrize("beside", ["another", "one that was killed"])
def test_a_cell_says_whether_it_was_alone(beside: str, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    number = os.getppid() if beside == "another" else ended.pid
    mark = tmp_path / "grid" / f"{grid_run.MARK}{number}"
    mark.parent.mkdir(parents=True)
    mark.touch()
    words = ["reproduce", "heads", *SCENES, "--rows", "fcn", "--steps", "1", "--out", str(tmp_path / "grid")]
    assert main(words) == 0
    assert cell(tmp_path / "grid", "fcn-seed0")["alone"] is (beside != "another")
    assert mark.exists() is (beside == "another")
    said = "trained beside others" in (tmp_path / "grid" / "heads.md").read_text()
    assert said is (beside == "another")


def test_speeds_are_of_cells_that_were_alone() -> None:
    record = {"images_per_second": 10.0, "peak_gpu_bytes": 5, "hardware": {"device": "one"}}
    cost = _cost([{**record, "alone": True}, {**record, "alone": False, "images_per_second": 4.0}])
    assert cost is not None
    assert cost.images_per_second == 10
    cost = _cost([{**record, "alone": False}])
    assert cost is not None
    assert cost.images_per_second is None
