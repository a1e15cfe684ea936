"""Export to INT8: scores before and after, and files that are complete or absent."""

import json
import signal
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import caaseg
from caaseg.cli import main
from caaseg.data.calibration import Calibration
from caaseg.data.catalogue import open_dataset
from caaseg.evaluation.evaluate import evaluate
from caaseg.evaluation.int8 import compare_int8, export_int8
from caaseg.models.onnx import OnnxModel
from tests import processes
from tests.data.trees import CAMVID
from tests.models.onnx_network import write_network
from tests.small_models import random_images, small_model, varied_model
from tests.training.small import images_and_masks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[OnnxModel, OnnxModel]:
    """Return two different models."""
    directory = tmp_path_factory.mktemp("models")
    for k in range(2):
        write_network(directory / f"{k}.onnx", seed=k)
    return OnnxModel(directory / "0.onnx"), OnnxModel(directory / "1.onnx")


def test_scores_with_labels_are_those_of_evaluate(models: tuple[OnnxModel, OnnxModel], tmp_path: Path) -> None:
    images_and_masks(tmp_path, number=4)
    (tmp_path / "classes.yaml").write_text("classes: [background, thing, other]\n")
    dataset = open_dataset("folder", tmp_path, "train")
    reports: list[tuple[str, int, int | None]] = []
    scores = compare_int8(
        *models, Calibration([], []), dataset, lambda step, done, total: reports.append((step, done, total))
    )
    assert scores.float32_mean_iou == evaluate(models[0], dataset).mean_iou
    assert scores.int8_mean_iou == evaluate(models[1], dataset).mean_iou
    assert 0 < scores.pixel_agreement < 1
    assert reports == [("comparing", k, 3) for k in (1, 2, 3)]


def test_pixel_agreement_is_reported_without_labels(models: tuple[OnnxModel, OnnxModel]) -> None:
    images = [random_images(6, 9, seed=k) for k in range(2)]
    calibration = Calibration([], [lambda: images[0], lambda: images[1]])
    scores = compare_int8(*models, calibration, None)
    same = [(models[0](image[None].float()).argmax(1) == models[1](image[None].float()).argmax(1)) for image in images]
    assert scores.pixel_agreement == pytest.approx(float(torch.cat(same).float().mean()))
    assert (scores.images, scores.float32_mean_iou, scores.int8_mean_iou) == (2, None, None)
    assert compare_int8(models[0], models[0], calibration, None).pixel_agreement == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--int8"], "--int8 needs images for calibration; give a directory with --calibrate DIR"),
        (["--calibrate", "data"], "--calibrate is 'data', but it is for INT8 models only; add --int8 or leave it out"),
        (["--dataset", "camvid"], "--dataset is 'camvid', but it is for INT8 models only"),
        (["--int8", "--calibrate", "data", "--format", "torch"], "--int8 is for plain ONNX files, but --format torch"),
        (["--int8", "--calibrate", "data", "--winograd"], "--int8 is for plain ONNX files, but --winograd was given"),
        (["--int8", "--calibrate", "data", "--root", "data"], "--root is 'data' without a dataset; add --dataset NAME"),
        (["--int8", "--calibrate", "nowhere"], "nowhere: no such directory; expected images for calibration"),
        (["--int8", "--calibrate", "empty"], "empty: 0 images for calibration; expected at least 8"),
        (["--int8", "--calibrate", "data"], "the model has 5 classes, but the dataset has 2 (0, 1)"),
        (["--int8", "--calibrate", "data", "--split", "best"], "data has no split 'best'; expected train or val"),
        (["--int8", "--calibrate", "data", "--out", "m.pt2"], "m.pt2: expected a name that ends in .onnx"),
    ],
)
def test_wrong_input_gets_one_message_and_writes_no_file(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    images_and_masks(tmp_path / "data", number=10)
    (tmp_path / "empty").mkdir()
    small_model().save_pretrained(tmp_path / "model")
    assert main(["export", "model", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"data", "empty", "model"}


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images_and_masks(tmp_path / "data", number=10)
    small_model().save_pretrained(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    arguments = ["--int8", "--calibrate", str(tmp_path / "data/images"), "--out", str(tmp_path / "m.onnx")]
    assert main(["export", str(tmp_path / "model"), *arguments]) == 2
    assert (
        "exporting to ONNX needs onnxruntime, which is not installed; install it with: pip" in capsys.readouterr().err
    )
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.slow
def test_the_command_stores_scores_and_its_file_works_like_any_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images_and_masks(tmp_path / "data", number=12)
    varied_model(2, classes=["background", "thing"]).save_pretrained(tmp_path / "model")
    assert main(["export", "model", "--int8", "--calibrate", "data"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"data", "model", "model-int8.onnx", "model-int8.onnx.json"}
    report = json.loads((tmp_path / "model-int8.onnx.json").read_text())
    scores = report["int8"]
    assert (scores["calibration_images"], scores["images"]) == (11, 1)
    assert scores["pixel_agreement"] > 0.9
    assert report["scored_on"] == {"dataset": "folder", "split": "val"}
    assert f"mean IoU: {100 * scores['float32_mean_iou']:.2f} in float32" in capsys.readouterr().out
    metadata = {entry.key: entry.value for entry in onnx.load("model-int8.onnx").metadata_props}
    assert json.loads(metadata["caaseg"])["int8"] == scores
    assert list(metadata) == ["caaseg"]

    arguments = ["--dataset", "folder", "--root", "data", "--workers", "0", "--json", "scores.json"]
    assert main(["evaluate", "model-int8.onnx", *arguments]) == 0
    assert json.loads(Path("scores.json").read_text())["mean_iou"] == scores["int8_mean_iou"]
    assert main(["predict", "model-int8.onnx", "data/images/3.jpg", "--out", "out"]) == 0
    with Image.open("out/labels/3.png") as labels:
        model = caaseg.load_model("model-int8.onnx")
        np.testing.assert_array_equal(np.array(labels), model.predict("data/images/3.jpg").labels)

    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save("data/images/zz.png")  # without a mask
    arguments = ["--calibrate", "data/images", "--out", "other.onnx", "--json", "-"]
    assert main(["export", "model", "--int8", *arguments]) == 0
    out, err = capsys.readouterr()
    unlabeled = json.loads(out[out.index("{") :])["int8"]
    assert unlabeled["float32_mean_iou"] is None
    assert "no labels, so the mean IoU is not known; give a labeled dataset with --dataset" in err
    assert not Path("other.onnx.json").exists()


def export_until_killed(path: Path) -> None:
    images = [random_images(16, 16, seed=k) for k in range(2)]

    def kill(step: str, done: int, total: int | None) -> None:
        if step == "comparing":
            signal.raise_signal(signal.SIGKILL)

    export_int8(small_model("fcn").eval(), path, Calibration([lambda: images[0]], [lambda: images[1]]), progress=kill)


@pytest.mark.slow
def test_no_file_is_left_by_a_killed_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "out").mkdir()
    assert processes.run(export_until_killed, tmp_path / "out/m.onnx") == -signal.SIGKILL
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not in ../shared/data/camvid")
def test_the_shipped_model_loses_less_than_a_point_on_every_third_image_of_camvid(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for path in CAMVID.iterdir():
        if path.name != "val.txt":
            (tmp_path / "data" / path.name).symlink_to(path)
    names = (CAMVID / "val.txt").read_text().splitlines(keepends=True)
    (tmp_path / "data" / "val.txt").write_text("".join(names[::3]))
    arguments = ["--calibrate", str(tmp_path / "data"), "--out", str(tmp_path / "m.onnx")]
    assert main(["export", "camvid", "--int8", *arguments]) == 0
    scores = json.loads((tmp_path / "m.onnx.json").read_text())["int8"]
    assert scores["images"] == 34
    assert scores["float32_mean_iou"] > 0.7
    assert scores["int8_mean_iou"] > scores["float32_mean_iou"] - 0.01
