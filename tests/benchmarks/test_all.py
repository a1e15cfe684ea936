"""`caaseg benchmark all`: parts that have finished are not repeated, and a part that fails does not end the others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from caaseg.benchmarks.all import INDEX, PARTS, Finished, Part, goals, read_index, run_parts
from caaseg.benchmarks.training import write_folder
from caaseg.cli import main, parse
from caaseg.data.datasets.folder import Folder
from caaseg.recipes import load_recipe

TWO = (Part("one", "cuda", 1, ("loader",), ()), Part("two", "cpu", 1, ("loader", "--root", "CAMVID"), ()))


def run(out: Path, commit: str = "abc", failing: str = "") -> tuple[list[str], list[str]]:
    """Run two parts, whose commands only write their file. Return the parts that ran and those that failed."""
    started: list[str] = []

    def write_file(command: list[str], log: Path) -> int:
        started.append(log.stem)
        Path(command[-1]).write_text("{}")
        return 3 if log.stem == failing else 0

    results = list(run_parts(TWO, out, commit=commit, device="one", camvid=Path("data"), run=write_file))
    records = [result._asdict() for result, _ in results]
    (out / INDEX).write_text(json.dumps({"parts": records}))
    assert [result.name for result, is_before in results if not is_before] == started
    assert results[1][0].command == ["benchmark", "loader", "--root", "data", "--json", str(out / "two.json")]
    return started, [result.name for result, _ in results if result.exit_code]


def test_only_parts_that_have_not_finished_run_again(tmp_path: Path) -> None:
    assert run(tmp_path, failing="one") == (["one", "two"], ["one"])
    assert run(tmp_path) == (["one"], [])
    assert run(tmp_path) == ([], [])
    assert run(tmp_path, commit="def") == (["one", "two"], [])
    (tmp_path / "two.json").unlink()
    assert run(tmp_path, commit="def") == (["two"], [])


@pytest.mark.parametrize("commit", ["abc+changes", None])
def test_code_without_a_commit_is_measured_again(commit: str | None) -> None:
    result = Finished("one", ["benchmark"], commit, "one", 1, 1.0, 0)
    assert not result.covers(result)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_command_of_every_part_is_valid(part: Part) -> None:
    for arguments in (part.arguments, part.quick):
        function, values = parse(["benchmark", *arguments])
        assert function.__name__ == f"benchmark_{arguments[0]}"
        if arguments[0] == "train":
            load_recipe(values["recipe"], values["overrides"])


def test_the_parts_of_the_gpu_take_at_most_eight_minutes() -> None:
    assert sum(part.seconds for part in PARTS if part.device == "cuda") <= 480


def test_goals_are_computed_from_the_numbers(tmp_path: Path) -> None:
    def model(name: str, training: float, inference: float) -> dict[str, Any]:
        speeds = {"training_images_per_second": training, "inference_images_per_second": inference}
        return {"model": name, "size": [513, 513], **speeds}

    ratios = {"implementation": "fused", "height": 65, "width": 65, "forward_graph_over_floor": 2.9}
    contents = {
        "fused": {"ratios": [{**ratios, "training_graph_speedup_over_grouped_16": 60.0}]},
        "model": {"models": [model("caa:captured", 200.0, 900.0)]},
        "model_compiled": {
            "models": [model("caa:captured", 290.0, 900.0), model("torchvision:fcn:compiled", 200.0, 800.0)]
        },
        "train_resnet101": {"images_per_second": 198.0},
        "train_camvid": {"gpu_utilization": 0.9, "first_step_s": 21.0},
        "cpu": {
            "ratios": {"caa_over_fcn": 1.1, "int8_over_onnx": 1.4},
            "camvid": {"float32_mean_iou": 0.6875, "int8_mean_iou": 0.625},
        },
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = {goal.name: (goal.value, goal.is_met) for goal in goals(tmp_path, contents)}
    assert found["forward over lower bound, 65 x 65"] == (2.9, True)
    assert found["forward over lower bound, 33 x 33"] == (None, None)
    assert found["forward and backward, speedup over grouped, 65 x 65"] == (60.0, False)
    assert found["training, speedup over compiled FCN"] == (1.45, True)
    assert found["inference, speedup over compiled FCN"] == (1.125, False)
    assert found["latency at 1025, compared with compiled FCN"] == (None, None)
    assert found["caaseg train, share of the benchmark's images per second"] == (0.99, True)
    assert found["camvid/caa_resnet18, GPU utilization"] == (0.9, True)
    assert found["camvid/caa_resnet18, seconds to the first step"] == (21.0, False)
    assert found["CPU, speedup over FCN in float32"] == (1.1, True)
    assert found["CPU, speedup of INT8 over float32 ONNX"] == (1.4, False)
    assert found["CPU, points of mean IoU that INT8 loses"] == (6.25, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the parts fused, attention, .* need an NVIDIA GPU, but torch sees none; .* at tiny sizes with --quick"),
        (["--parts", "loader"], "the parts loader need --camvid, the directory of CamVid"),
        (
            ["--parts", "loader", "--camvid", "missing"],
            "--camvid is 'missing': no such directory; expected the directory",
        ),
        (["--parts", "speed"], "--parts has 'speed'; expected any of fused, attention, model, "),
    ],
)
def test_what_a_part_needs_is_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["benchmark", "all", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert len(re.findall(message, capfd.readouterr().err)) == 1
    assert not (tmp_path / "out").exists()


def test_written_folders_have_many_classes_and_both_formats(tmp_path: Path) -> None:
    write_folder(tmp_path, 4, (64, 70), 59)
    assert {path.suffix for path in (tmp_path / "images").iterdir()} == {".jpg", ".png"}
    dataset = Folder(tmp_path, "train")
    assert len(dataset.classes) == 59
    assert len(torch.unique(dataset[0].label)) > 40


@pytest.mark.slow
def test_parts_run_at_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CAASEG_COMMIT", "abc")
    parts = ["fused", "train_camvid_device", "loader"]
    arguments = ["benchmark", "all", "--quick", "--out", str(tmp_path), "--parts", ",".join(parts)]
    assert main(arguments) == 0, "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    results = read_index(tmp_path)
    assert [(result.name, result.commit) for result in results] == [(name, "abc") for name in parts]
    assert {json.loads((tmp_path / f"{name}.json").read_text())["commit"] for name in parts} == {"abc"}
    measured = json.loads((tmp_path / "train_camvid_device.json").read_text())
    assert measured["first_step_s"] > 0
    assert measured["images_per_second"] > 0
    assert 0 <= measured["waiting"] < 1
    assert main([*arguments[:-1], "fused"]) == 0
    assert "fused: finished before" in capsys.readouterr().out
