"""Devices, and paths that cannot be written to, which are refused before any work."""

import os
from pathlib import Path

import pytest
import torch

from caaseg.cli import main, parse
from caaseg.cli.arguments import check_writable, device_of


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "no-model", "--dataset", "scenes"],
        ["data", "check", "camvid", "--root", "nowhere"],
        ["benchmark", "loader", "--root", "nowhere"],
        ["reproduce", "heads", "--dataset", "scenes", "--out", "grid"],
        ["demo", "--out", "out"],
    ],
)
def test_a_directory_is_refused_as_json_file(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert main([*arguments, "--json", "taken"]) == 2
    assert capsys.readouterr().err == "caaseg: --json is 'taken'; expected the name of a file\n"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["predict", "m", "photo.png", "--out", "out", "--json", "photo.png"], "--json"),
        (["predict", "m", "photo.png", "--out", "out", "--json", "m/config.json"], "--json"),
        (["evaluate", "m", "--dataset", "folder", "--root", "data", "--page", "data/images/a.png"], "--page"),
        (["compare", "m", "m", "--dataset", "folder", "--root", "data", "--out", "data/images/a.png"], "--out"),
        (["conflicts", "m", "--dataset", "folder", "--root", "data", "--out", "o", "--json", "data/a.txt"], "--json"),
        (["export", "m", "--out", "m/model.onnx"], "--out"),
        (["convert", "m", "--out", "new", "--json", "m/model.onnx"], "--json"),
        (["data", "check", "folder", "--root", "data", "--json", "data/a.txt"], "--json"),
        (["data", "show", "folder", "--root", "data", "--out", "link.png"], "--out"),
    ],
)
def test_an_input_is_refused_as_output_file(
    arguments: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photo.png", "m/config.json", "m/model.onnx", "data/images/a.png", "data/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "link.png").symlink_to("data/images/a.png")
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"caaseg: {option} is '{arguments[-1]}', which the command reads; choose")


def test_results_of_an_earlier_command_in_an_input_directory_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text("{}")
    check_writable([tmp_path], json=tmp_path / "scores.json", page=tmp_path / "new.html")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["reproduce", "heads", "--dataset", "scenes", "--out", "taken"], "--out"),
        (["demo", "--out", "taken"], "--out"),
        (["evaluate", "no-model", "--dataset", "cityscapes", "--submission", "taken"], "--submission"),
    ],
)
def test_a_file_is_refused_as_output_directory(
    arguments: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("something")
    assert main(arguments) == 2
    assert f"{option} is 'taken', which is a file; expected a new or existing directory" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "something"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["evaluate", "no-model", "--dataset", "scenes", "--json", "locked/new/scores.json"], "--json"),
        (["evaluate", "no-model", "--dataset", "scenes", "--page", "locked/page.html"], "--page"),
        (["reproduce", "heads", "--dataset", "scenes", "--out", "locked/grid"], "--out"),
    ],
)
def test_a_path_without_permission_is_refused_before_any_work(
    arguments: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "locked").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")  # root may write everywhere
    assert main(arguments) == 2
    locked = tmp_path / "locked"
    expected = f"caaseg: {option} is {arguments[-1]!r}, but {locked} is not writable; choose another path\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps"])
def test_devices_are_those_of_torch(device: str) -> None:
    assert parse(["evaluate", "m", "--dataset", "scenes", "--device", device])[1]["device"] == device


def test_a_device_that_this_machine_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of("auto") == torch.device("cuda")
    assert device_of("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="--device is cuda:1, but there are 1 GPUs, numbered from 0"):
        device_of("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device is cuda:1, but torch sees no GPU here; use --device cpu"):
        device_of("cuda:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device is mps, but torch cannot use it here"):
        device_of("mps")


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["predict", "m", "x.jpg", "--out", "o", "--window", "64", "48"], "window", (64, 48)),
        (["predict", "m", "x.jpg", "--out", "o", "--window", "64x48"], "window", (64, 48)),
        (["predict", "m", "--window", "64", "x.jpg", "--out", "o"], "window", (64, 64)),
        (["flops", "--size", "64", "48"], "size", (64, 48)),
        (["benchmark", "loader", "--crop", "64x48"], "crop", (64, 48)),
        (["benchmark", "model", "--sizes", "64,48x32"], "sizes", ((64, 64), (48, 32))),
        (["benchmark", "attention", "--sizes", "1x2x3", "4x5x6"], "sizes", ((1, 2, 3), (4, 5, 6))),
        (["evaluate", "m", "--dataset", "scenes", "--scales", "0.5", "1.0", "1.5"], "scales", (0.5, 1.0, 1.5)),
        (["evaluate", "--scales", "0.5,1", "m", "--dataset", "scenes"], "scales", (0.5, 1.0)),
        (["benchmark", "attention", "--dtypes", "bfloat16"], "dtypes", ("bfloat16",)),
        (["benchmark", "attention", "--dtypes", "float32,bfloat16"], "dtypes", ("float32", "bfloat16")),
        (["benchmark", "attention", "--dtypes", "float32", "float64"], "dtypes", ("float32", "float64")),
        (["evaluate", "--flip", "m", "--dataset", "scenes"], "flip", True),
        (["evaluate", "m", "--dataset", "scenes", "--flip", "false"], "flip", False),
        (["evaluate", "m", "--dataset", "scenes", "--json", "-"], "json", "-"),
        (["reproduce", "table2", "--out", "o", "--rows", "axial", "caa"], "rows", ("axial", "caa")),
        (["reproduce", "table2", "--out", "o", "--rows", "axial,caa"], "rows", ("axial", "caa")),
    ],
)
def test_values_can_be_written_in_several_ways(arguments: list[str], option: str, value: object) -> None:
    assert parse(arguments)[1][option] == value


def test_an_integer_with_too_many_digits_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", "--gate-layers", "9" * 5000]) == 2
    said = capsys.readouterr().err
    assert said.startswith("caaseg: --gate-layers is '999")
    assert said.endswith("; expected a valid integer\n")
