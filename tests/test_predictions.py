"""`caaseg predict`: what is written, what is skipped, what is said; damaged files, several processes, a huge image."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import caaseg
from caaseg.cli import main
from caaseg.config import ModelConfig
from caaseg.data.catalogue import open_dataset
from caaseg.data.decode import read_image
from caaseg.data.inputs import InputImage, find_images
from caaseg.data.labels import distinct_colors
from caaseg.drawing.overlays import overlay
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models import load_model
from caaseg.models.inference import LoadedModel, load_for_inference
from caaseg.models.predictor import Predictor
from caaseg.predictions import PredictOptions, PredictTask, predict_images
from caaseg.recipes import load_recipe
from caaseg.training.run import train
from tests import processes
from tests.data.damage import encoded_images, mutated
from tests.data.trees import folder_of_scenes
from tests.locks import hold_lock
from tests.processes import exit_with_command, run_ranks
from tests.small_models import scene, varied_model
from tests.training.small import SMALL_ARGUMENTS, images_and_masks

CLASSES = 6


def save(k: int, path: Path, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(scene(k).permute(1, 2, 0).numpy()).save(path, **options)


def values(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        assert image.mode == "P"
        return np.array(image)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict") / "model"
    varied_model().save_pretrained(folder)
    return folder


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images, two of one name."""
    monkeypatch.chdir(tmp_path)
    save(0, Path("photos/a/x.png"))
    save(1, Path("photos/b/x.png"))
    save(2, Path("photos/y.jpg"), quality=95)
    return tmp_path


def predict(model: Path, *arguments: str) -> int:
    return main(["predict", str(model), *arguments, "--device", "cpu"])


def digest(model: Path) -> str:
    return load_for_inference(str(model)).digest


def results(out: Path) -> dict[str, int]:
    """Every file, with when it was written."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in sorted(out.rglob("*")) if path.is_file()}


def test_overlays_have_a_legend_on_request(model: Path, cwd: Path) -> None:
    assert predict(model, "photos/y.jpg", "--out", "plain") == 0
    assert predict(model, "photos/y.jpg", "--out", "named", "--legend") == 0
    plain, named = (np.array(Image.open(cwd / out / "overlays/y.jpg")) for out in ("plain", "named"))
    assert (len(named), named.shape[1] > plain.shape[1] + 20) == (len(plain), True)
    labels, again = (np.array(Image.open(cwd / out / "labels/y.png")) for out in ("plain", "named"))
    assert np.array_equal(labels, again)


def test_a_directory_of_images_gets_labels_overlays_and_probabilities(model: Path, cwd: Path) -> None:
    assert predict(model, "photos", "--out", "out", "--probabilities") == 0
    names = ("a/x", "b/x", "y")
    files = {f"labels/{n}.png" for n in names} | {f"overlays/{n}.jpg" for n in names}
    files |= {f"probabilities/{n}.npy" for n in names} | {f"metadata/{n}.json" for n in names} | {"predict.json"}
    assert set(results(cwd / "out")) == files
    network = load_model(model)
    for name, source in (("a/x", "photos/a/x.png"), ("b/x", "photos/b/x.png"), ("y", "photos/y.jpg")):
        image = read_image(Path(source))
        expected = Predictor(network).scores(image[None])[0]
        labels = values(cwd / f"out/labels/{name}.png")
        assert np.array_equal(labels, expected.argmax(0).numpy())
        assert len(np.unique(labels)) > 1
        assert np.array_equal(labels, network.predict(source).labels)
        with Image.open(cwd / f"out/labels/{name}.png") as opened:
            assert opened.getpalette()[: 3 * CLASSES] == [v for c in distinct_colors(CLASSES) for v in c]  # type: ignore[index]
        with Image.open(cwd / f"out/overlays/{name}.jpg") as opened:
            drawn = overlay(image.permute(1, 2, 0).numpy(), labels, distinct_colors(CLASSES))
            assert np.abs(np.array(opened).astype(int) - drawn).mean() < 6
        saved = np.load(cwd / f"out/probabilities/{name}.npy")
        assert saved.dtype == np.float16
        np.testing.assert_allclose(saved, expected.softmax(0).permute(1, 2, 0), atol=1e-3)


def test_labels_have_the_palette_of_the_model(cwd: Path) -> None:
    palette = [(k, 2 * k, 255 - k) for k in range(3)]
    varied_model(3, classes=["road", "tree", "sky"], palette=palette).save_pretrained(cwd / "own")
    assert predict(cwd / "own", "photos/y.jpg", "--out", "out") == 0
    with Image.open(cwd / "out/labels/y.png") as image:
        assert image.getpalette()[:9] == [value for color in palette for value in color]  # type: ignore[index]
    record = json.loads((cwd / "out/predict.json").read_text())
    assert record["classes"] == ["road", "tree", "sky"]
    assert record["palette"] == [list(color) for color in palette]


def test_labels_have_the_source_values_on_request(model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that was trained on black and white masks writes black and white labels."""
    images_and_masks(cwd / "data")
    for mask in (cwd / "data/masks").iterdir():
        Image.fromarray(255 * np.array(Image.open(mask))).save(mask)
    arguments = (
        *SMALL_ARGUMENTS,
        "--data.dataset",
        "folder",
        "--data.root",
        "data",
        "--data.crop",
        "32",
        "32",
        "--steps",
        "1",
    )
    recipe = load_recipe("scenes/caa_resnet18", [*arguments, "--validate_every", "1"])
    train(recipe, cwd / "run", device="cpu")
    assert predict(cwd / "run", "data/images", "--out", "out") == 0
    assert predict(cwd / "run", "data/images", "--out", "source", "--source-values") == 0
    with Image.open("source/labels/0.png") as image:
        assert image.mode == "L"
        assert np.array_equal(np.array(image), 255 * values(cwd / "out/labels/0.png"))
    assert predict(cwd / "run", "data/images", "--out", "source") == 2
    assert "source_values true, not false" in capsys.readouterr().err
    assert predict(model, "photos", "--out", "unknown", "--source-values") == 2
    assert "the values of its training masks are unknown" in capsys.readouterr().err
    assert not (cwd / "unknown").exists()


def test_results_follow_the_exif_rotation_of_the_image(model: Path, cwd: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # the viewer must rotate it clockwise
    save(0, cwd / "turned.png", exif=turned)
    assert predict(model, "turned.png", "--out", "out", "--probabilities") == 0
    upright = np.ascontiguousarray(np.rot90(scene(0).permute(1, 2, 0).numpy(), k=-1))
    labels = values(cwd / "out/labels/turned.png")
    assert labels.shape == (96, 72)
    assert np.array_equal(labels, Predictor(load_model(model))(upright))
    with Image.open(cwd / "out/overlays/turned.jpg") as image:
        assert image.size == (72, 96)
        assert not image.getexif()
    assert np.load(cwd / "out/probabilities/turned.npy").shape == (96, 72, CLASSES)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_options_give_the_results_of_a_predictor_with_the_same_options(model: Path, cwd: Path, average: str) -> None:
    arguments = ["--scales", "0.5,1.0", "--flip", "--average", average, "--output-stride", "8", "--precision", "bf16"]
    assert predict(model, "photos/y.jpg", "--out", "out", "--probabilities", *arguments) == 0
    network = caaseg.models.with_output_stride(load_model(model), 8)
    predictor = Predictor(network, scales=(0.5, 1.0), flip=True, average=average, precision="bf16")  # type: ignore[arg-type]
    scores = predictor.scores(read_image(Path("photos/y.jpg"))[None])[0]
    probabilities = scores.softmax(0) if average == "logits" else scores
    saved = np.load(cwd / "out/probabilities/y.npy")
    np.testing.assert_allclose(saved, probabilities.permute(1, 2, 0), atol=0.02)  # other batch sizes round differently
    assert (values(cwd / "out/labels/y.png") == scores.argmax(0).numpy()).mean() > 0.98


def test_windows_are_blended_and_compared_with_a_shifted_grid(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["photos/y.jpg", "--out", "out", "--window", "48x33", "--compare-grids", "--json", "out.json"]
    assert predict(model, *arguments) == 0
    expected = Predictor(load_model(model), window=(48, 33))(cwd / "photos/y.jpg")
    found = values(cwd / "out/labels/y.png")
    assert (found == expected).mean() > 0.999  # up to rounding
    (image,) = json.loads((cwd / "out.json").read_text())["images"]
    share = image["grid_disagreement"]
    assert 0 < share < 1
    assert (
        f"photos/y.jpg: {100 * share:.2f}% of the pixels get another class with a shifted grid"
        in capsys.readouterr().out
    )
    assert image["tiled"]
    assert predict(model, *arguments) == 0  # skips the image
    (again,) = json.loads((cwd / "out.json").read_text())["images"]
    assert again["already_done"]
    assert again["grid_disagreement"] == share


@pytest.mark.parametrize(
    ("size", "num_classes", "is_tiled"),
    [
        ((2048, 2048), 32, False),
        ((2048, 2049), 32, True),
        ((1024, 1024), 128, False),
        ((1024, 1025), 128, True),
    ],
)
def test_large_images_are_tiled(size: tuple[int, int], num_classes: int, is_tiled: bool) -> None:
    model = nn.Identity()
    model.config = ModelConfig(num_classes=num_classes)  # type: ignore[assignment]
    assert caaseg.Predictor(model).is_tiled(size) == is_tiled
    assert caaseg.Predictor(model, window=(99, 77)).is_tiled(size)
    assert not caaseg.Predictor(model, size=500).is_tiled(size)  # after resizing


def test_a_repeated_command_predicts_only_missing_and_changed_images(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(model, "photos", "--out", "out") == 0
    assert capsys.readouterr().out.startswith("3 predicted, 0 already done, 0 failed: out\n")
    first = results(cwd / "out")
    assert predict(model, "photos", "--out", "out") == 0
    assert capsys.readouterr().out.startswith("0 predicted, 3 already done, 0 failed: out\n")
    assert results(cwd / "out") == first

    save(3, cwd / "photos/a/x.png")  # another image with the same name
    (cwd / "out/overlays/b/x.jpg").unlink()
    assert predict(model, "photos", "--out", "out") == 0
    assert capsys.readouterr().out.startswith("2 predicted, 1 already done")
    expected = Predictor(load_model(model))(cwd / "photos/a/x.png")
    assert np.array_equal(values(cwd / "out/labels/a/x.png"), expected)
    assert results(cwd / "out")["labels/y.png"] == first["labels/y.png"]

    assert predict(model, "photos", "--out", "out", "--probabilities") == 0
    assert capsys.readouterr().out.startswith("3 predicted, 0 already done")
    save(4, cwd / "photos/a/x.png")
    assert predict(model, "photos", "--out", "out") == 0
    assert not (cwd / "out/probabilities/a/x.npy").exists()  # they belonged to another image
    assert (cwd / "out/probabilities/b/x.npy").exists()


def test_the_content_of_an_image_file_decides_whether_it_is_predicted_again(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edited image may have the same number of bytes and the same modification time; a copy has another time."""
    path = cwd / "photos/z.bmp"  # not compressed: all images of one size have the same number of bytes
    save(0, path)
    status = path.stat()
    assert predict(model, "photos/z.bmp", "--out", "out") == 0
    save(1, path)
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    capsys.readouterr()
    assert predict(model, "photos/z.bmp", "--out", "out") == 0
    assert capsys.readouterr().out.startswith("1 predicted, 0 already done")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    assert predict(model, "photos/z.bmp", "--out", "out") == 0
    assert capsys.readouterr().out.startswith("0 predicted, 1 already done")


def test_results_that_are_not_requested_again_are_kept(model: Path, cwd: Path) -> None:
    arguments = ["photos/y.jpg", "--out", "out", "--window", "48x33", "--json", "out.json"]
    saved = cwd / "out/probabilities/y.npy"
    assert predict(model, *arguments, "--probabilities") == 0
    before = saved.stat().st_mtime_ns
    assert predict(model, *arguments, "--compare-grids") == 0
    assert saved.stat().st_mtime_ns == before
    (cwd / "out/overlays/y.jpg").unlink()
    assert predict(model, *arguments) == 0  # writes the missing overlay again
    assert predict(model, *arguments, "--probabilities", "--compare-grids") == 0
    (image,) = json.loads((cwd / "out.json").read_text())["images"]
    assert image["already_done"]
    assert 0 < image["grid_disagreement"] < 1


def test_a_directory_without_predictions_may_be_used_with_other_options(model: Path, cwd: Path) -> None:
    assert predict(model, "nowhere", "--out", "out") == 2
    assert predict(model, "photos/y.jpg", "--out", "out", "--flip") == 0
    assert predict(model, "photos/y.jpg", "--out", "out") == 2


def test_predictions_of_another_model_or_other_options_in_the_directory_are_an_error(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(model, "photos/y.jpg", "--out", "out") == 0
    shutil.copytree(model, cwd / "copy")
    assert predict(cwd / "copy", "photos/y.jpg", "--out", "out") == 0  # the same model in another directory
    before = results(cwd / "out")
    network = varied_model()
    with torch.no_grad():
        network.classifier.weight += 1e-3
    network.save_pretrained(cwd / "other")
    capsys.readouterr()
    for arguments, what in (
        ([str(model), "--flip"], "flip false, not true"),
        ([str(model), "--scales", "2", "--window", "64"], "scales [1.0], not [2.0] and with window null, not [64, 64]"),
        ([str(model), "--output-stride", "8"], "output_stride 16, not 8"),
        ([str(cwd / "other")], f'model_sha256 "{digest(model)}", not "{digest(cwd / "other")}"'),
    ):
        assert main(["predict", arguments[0], "photos", "--out", "out", *arguments[1:]]) == 2
        assert f"out: has predictions with {what}; use another --out" in capsys.readouterr().err
    assert results(cwd / "out") == before
    (cwd / "out/predict.json").write_text("[]")
    assert predict(model, "photos", "--out", "out") == 2
    assert "out/predict.json: not a record of predictions" in capsys.readouterr().err


def test_predict_never_replaces_the_labels_of_a_dataset(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(0, cwd / "my/images/x.png")
    (cwd / "my/labels").mkdir()
    (cwd / "my/labels/x.png").write_bytes(b"drawn by hand")
    before = results(cwd / "my")
    assert predict(model, "my/images", "--out", "my") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("caaseg: my/labels: has files, and caaseg predict did not write them, because there")
    assert captured.err.count("\n") == 1
    assert results(cwd / "my") == before


def test_names_with_markup_and_escape_sequences_are_printed_escaped(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cwd / "photos/a\x1b[2J\nb.png").write_text("not an image")
    assert predict(model, "photos", "--out", "[/]run\x1b[2J", "--json", "[/b].json") == 2
    captured = capsys.readouterr()
    assert captured.out == "3 predicted, 0 already done, 1 failed: [/]run\\x1b[2J\nnumbers: [/b].json\n"
    assert captured.err.startswith("caaseg: photos/a\\x1b[2J\\nb.png: not an image")
    assert captured.err.count("\n") == 1


def test_an_image_may_have_the_name_of_the_record(model: Path, cwd: Path) -> None:
    shutil.copy(cwd / "photos" / "a" / "x.png", cwd / "predict.json.png")
    assert main(["predict", str(model), "predict.json.png", "--out", "out", "--device", "cpu"]) == 0


def test_bad_files_are_reported_and_the_other_images_are_predicted(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cwd / "photos/a/bad.png").write_text("not an image")
    whole = (cwd / "photos/y.jpg").read_bytes()
    (cwd / "photos/cut.jpg").write_bytes(whole[: len(whole) // 2])
    (cwd / "photos/notes.txt").write_text("left out")
    arguments = ["photos", "gone.png", "photos/*.gif", "--out", "out", "--json", "-"]
    assert predict(model, *arguments) == 2
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert "3 predicted, 0 already done, 3 failed: out" in captured.err
    assert "skipped files without the suffix of an image: 1" in captured.err
    assert re.search(r"^caaseg: photos/a/bad\.png: not an image in any of", captured.err, re.MULTILINE)
    assert re.search(r"^caaseg: photos/cut\.jpg: cannot be read as an image .*truncated", captured.err, re.MULTILINE)
    assert re.search(r"^caaseg: gone\.png: No such file or directory; expected an image", captured.err, re.MULTILINE)
    assert re.search(r"^caaseg: photos/\*\.gif: no file matches", captured.err, re.MULTILINE)
    assert "Traceback" not in captured.err
    found = {image["image"]: image for image in content["images"]}
    assert len(found) == 6
    for image in found.values():
        assert (image["labels"] is None) != (image["message"] is None)
    assert content["faults"][0].startswith("photos/*.gif: ")


def test_a_name_that_cannot_be_written_does_not_stop_the_other_images(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "n" * 250 + ".png"  # with any longer suffix, too long for the file system
    shutil.copy("photos/a/x.png", f"photos/{long}")
    odd = os.fsdecode(b"photos/\xff.png")  # not UTF-8
    shutil.copy("photos/a/x.png", odd)
    assert predict(model, "photos", "--out", "out", "--json", "out.json") == 2
    error = capsys.readouterr().err
    assert f"caaseg: photos/{long}: its results cannot be written" in error
    assert error.count("\n") == 1
    assert (cwd / os.fsdecode(b"out/labels/\xff.png")).is_file()
    assert len(json.loads((cwd / "out.json").read_text())["images"]) == 5


def test_the_output_directory_may_be_inside_the_input_directory(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in ("photos", "photos/results"):
        for done in ("3 predicted, 0 already done", "0 predicted, 3 already done"):
            assert predict(model, "photos", "--out", out) == 0
            assert capsys.readouterr().out.startswith(done)
        shutil.rmtree(cwd / out / "labels")
        shutil.rmtree(cwd / out / "overlays")
        shutil.rmtree(cwd / out / "metadata")
        (cwd / out / "predict.json").unlink()


class Failing(nn.Module):
    """Fails on wide images, in the given way."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[3] > 100:
            raise self.error
        return images


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "wide.png: out of memory; use a smaller"),
        (MemoryError(), "wide.png: out of memory"),
        (
            RuntimeError("value cannot be converted to type int without overflow"),
            "wide.png: the model failed on it (value cannot be converted to type int without overflow)",
        ),
        (RuntimeError("kernel size\nlong"), "wide.png: the model failed on it (kernel size); try another --window"),
    ],
)
def test_an_image_on_which_the_model_fails_does_not_stop_the_other_images(
    error: Exception, message: str, cwd: Path
) -> None:
    Image.new("RGB", (120, 10)).save("wide.png")
    images = [InputImage(Path("wide.png"), Path("wide")), InputImage(Path("photos/y.jpg"), Path("y"))]
    model = LoadedModel(Failing(error), 3, None, distinct_colors(3), "")
    bad, good = predict_images(PredictTask(model=model, options=PredictOptions(), out=cwd / "out"), images)
    assert bad.message is not None
    assert bad.message.startswith(message)
    assert good.labels == str(cwd / "out/labels/y.png")


def test_a_full_disk_stops_the_command(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(image: Image.Image, path: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Image.Image, "save", full)
    task = PredictTask(
        model=LoadedModel(nn.Identity(), 3, None, distinct_colors(3), ""), options=PredictOptions(), out=cwd / "out"
    )
    with pytest.raises(OSError, match="No space left") as caught:
        predict_images(
            task, [InputImage(Path("photos/y.jpg"), Path("y")), InputImage(Path("photos/a/x.png"), Path("x"))]
        )
    assert caught.value.filename == str(cwd / "out/overlays/y.jpg")
    assert [path.name for path in (cwd / "out/metadata").iterdir()] == ["y.json"]  # image x was not started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "photos/y.jpg"], "--out is 'photos/y.jpg', which is a file; expected a new or existing directory"),
        (["--out", "out", "--scales", "big"], "--scales is ['big']; expected a valid number"),
        (["--out", "out", "--window", "1x2x3"], "--window is '1x2x3'; expected at most 2 items"),
        (["--out", "out", "--max-pixels", "0"], "--max-pixels is 0; expected greater than or equal to 1"),
        (["--out", "out", "--json", "photos"], "--json is 'photos'; expected the name of a file"),
    ],
)
def test_bad_options_give_one_message(
    model: Path, cwd: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(model, "photos", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (cwd / "out").exists()


def test_the_pixel_limit_is_an_option(model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(model, "photos/y.jpg", "--out", "out", "--max-pixels", str(72 * 96 - 1)) == 2
    assert "photos/y.jpg: 96 x 72 pixels; expected at most 6,911; resize or crop the image, or raise" in (
        capsys.readouterr().err
    )
    assert predict(model, "photos/y.jpg", "--out", "out", "--max-pixels", str(72 * 96)) == 0


def command(model: Path, *arguments: str) -> list[str]:
    return ["predict", str(model), *arguments, "--device", "cpu"]


def check_shared_outcomes(cwd: Path, out: str, err: str) -> None:
    """Check the output of two processes that predicted three images and one bad file."""
    assert out.count("3 predicted, 0 already done, 1 failed: out") == 1, err
    assert err.count("caaseg: photos/bad.png: not an image") == 1
    assert len(json.loads((cwd / "out.json").read_text())["images"]) == 4
    assert len(list((cwd / "out/labels").rglob("*.png"))) == 3


def test_two_ranks_share_the_images(model: Path, cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (cwd / "photos/bad.png").write_text("not an image")
    assert run_ranks(exit_with_command, command(model, "photos", "--out", "out", "--json", "out.json")) == [2, 0]
    check_shared_outcomes(cwd, *capfd.readouterr())


def contents(out: Path) -> dict[str, bytes]:
    """Every file with its content."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("first", "step"), [(0, 1), (10, 5)])
def test_the_tasks_of_a_slurm_array_write_the_files_of_one_process(
    model: Path,
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first: int,
    step: int,
) -> None:
    for k in range(4):
        save(k, cwd / f"photos/{k}.png")
    assert predict(model, "photos", "--out", "whole") == 0
    assert capsys.readouterr().out.startswith("7 predicted, 0 already done")
    for name, value in (("COUNT", 4), ("MIN", first), ("MAX", first + 3 * step), ("STEP", step)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    for task, number in enumerate((2, 2, 2, 1)):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(first + task * step))
        assert predict(model, "photos", "--out", "parts") == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{number} predicted, 0 already done")
        assert printed.endswith(f"SLURM array task {task + 1} of 4: {number} of 7 images\n")
    assert contents(cwd / "parts") == contents(cwd / "whole")


def test_a_slurm_array_with_gaps_is_refused(
    model: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("ID", 1), ("COUNT", 3), ("MIN", 1), ("MAX", 9)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    assert predict(model, "photos", "--out", "out") == 2
    assert "the SLURM job array has 3 tasks from 1 to 9; expected tasks at equal intervals" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_of_torchrun_share_the_images(model: Path, cwd: Path) -> None:
    (cwd / "photos/bad.png").write_text("not an image")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "caaseg"]
    result = subprocess.run(
        [*launch, *command(model, "photos", "--out", "out", "--json", "out.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode != 0
    check_shared_outcomes(cwd, result.stdout, result.stderr)


def test_an_image_locked_by_another_process_is_predicted_last(model: Path, cwd: Path) -> None:
    ready = processes.CONTEXT.SimpleQueue()
    (cwd / "out").mkdir()
    other = processes.start(hold_lock, cwd / "out", "metadata/y.json", ready)
    try:
        assert ready.get()
        task = PredictTask(model=load_for_inference(str(model)), options=PredictOptions(), out=Path("out"))
        found = find_images(["photos"]).images
        assert [str(image.name) for image in found] == ["y", "a/x", "b/x"]

        def kill_when_the_rest_is_done(what: str, done: int, total: int | None) -> None:
            if done == 2:
                assert not Path("out/labels/y.png").exists()
                other.kill()  # the operating system releases its lock

        outcomes = predict_images(task, found, progress=kill_when_the_rest_is_done)
        assert [outcome.image for outcome in outcomes] == ["photos/a/x.png", "photos/b/x.png", "photos/y.jpg"]
        assert all(outcome.labels for outcome in outcomes)
        assert not list(Path("out").glob(".*"))  # no lock file is left
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize(
    ("window", "scales", "flip"),
    [
        (None, "1.0", False),
        ("48x33", "0.5,1.25", True),
        pytest.param(None, "0.5,1.0,1.25", False, marks=pytest.mark.slow),
        pytest.param(None, "0.5,1.0,1.25", True, marks=pytest.mark.slow),
        pytest.param(None, "1.0", True, marks=pytest.mark.slow),
        pytest.param("48x33", "1.0", False, marks=pytest.mark.slow),
        pytest.param("48x33", "1.0", True, marks=pytest.mark.slow),
        pytest.param("48x33", "0.5,1.0,1.25", False, marks=pytest.mark.slow),
    ],
)
def test_evaluate_scores_the_labels_that_predict_writes(cwd: Path, window: str | None, scales: str, flip: bool) -> None:
    images = folder_of_scenes(cwd / "data", 3, (72, 96))
    data = open_dataset("folder", cwd / "data", "val")
    varied_model(len(data.classes)).save_pretrained(cwd / "scenes")
    options = ["--scales", scales, *(["--window", window] if window else []), *(["--flip"] if flip else [])]
    arguments = ["--dataset", "folder", "--root", "data", "--device", "cpu", "--workers", "0", "--json", "scores.json"]
    assert main(["evaluate", "scenes", *arguments, *options]) == 0

    assert predict(cwd / "scenes", *map(str, images), "--out", "out", *options) == 0
    matrix = ConfusionMatrix(len(data.classes), torch.device("cpu"))
    for k in range(len(data)):
        matrix.update(torch.from_numpy(values(cwd / f"out/labels/{data[k].name}.png")).long(), data[k].label)
    assert json.loads((cwd / "scores.json").read_text())["confusion"] == matrix.counts.tolist()
    assert (matrix.counts.sum(0) > 0).sum() > 3  # predicted classes


def test_temporary_files_of_a_killed_process_are_deleted(model: Path, cwd: Path) -> None:
    left = [cwd / f"out/{name}" for name in ("labels/.y.0123456789ab.part.png", "overlays/.y.0123456789ab.part.jpg")]
    for path in left:
        path.parent.mkdir(parents=True)
        path.touch()
    assert predict(model, "photos/y.jpg", "--out", "out") == 0
    assert (cwd / "out/labels/y.png").exists()
    assert not any(path.exists() for path in left)


@pytest.mark.slow
def test_two_processes_share_the_images_and_redo_those_of_a_killed_one(model: Path, cwd: Path) -> None:
    for k in range(40):
        save(k % 8, cwd / f"photos/many/{k}.png")
    launch = [sys.executable, "-m", "caaseg", *command(model, "photos", "--out", "out", "--scales", "1,2,3")]

    def start(name: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([*launch, "--json", name], stdout=subprocess.PIPE, text=True)

    with start("one.json") as one, start("two.json") as two, start("three.json") as three:
        while not list((cwd / "out").rglob("labels/*/*.png")):  # until the first labels are written
            assert three.poll() is None
        three.kill()
        assert one.wait(300) == two.wait(300) == 0
    found = [json.loads((cwd / name).read_text())["images"] for name in ("one.json", "two.json")]
    for images in found:
        assert len(images) == 43  # each command reports all images
        assert all(image["labels"] is not None for image in images)
    done = [{p["image"] for p in images if not p["already_done"]} for images in found]
    assert not done[0] & done[1]  # no image was predicted twice
    assert not list((cwd / "out").rglob("*.part.*"))  # temporary files of the killed process are deleted
    assert {path.stem for path in (cwd / "out/labels/many").iterdir()} >= {str(k) for k in range(40)}


def peak_memory(model: Path, *arguments: str) -> int:
    """Return the peak memory of a process that predicts, in bytes."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.peak_memory", *command(model, *arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout.rpartition("peak ")[2])


def damaged(model: Path, cwd: Path, number: int, seed: int) -> None:
    """Predict damaged files: each gives readable labels, or a message that names the file."""
    rng, seeds = np.random.default_rng(seed), encoded_images()
    folder = cwd / "damaged"
    folder.mkdir()
    for k in range(number):
        (folder / f"{k:03d}.png").write_bytes(mutated(seeds[k % len(seeds)], rng))  # with random changes
    (folder / f"{number:03d}.png").write_bytes(seeds[0])  # an intact file after all others
    assert predict(model, "damaged", "--out", "out", "--json", "out.json") == 2
    images = json.loads((cwd / "out.json").read_text())["images"]
    assert [image["image"] for image in images] == [f"damaged/{k:03d}.png" for k in range(number + 1)]
    good = [image for image in images if image["labels"] is not None]
    bad = [image for image in images if image["message"] is not None]
    assert len(good) + len(bad) == number + 1
    assert len(good) > number // 50
    assert len(bad) > number // 4
    assert good[-1]["image"] == f"damaged/{number:03d}.png"
    for image in good:
        assert values(cwd / image["labels"]).shape == tuple(image["size"])
    for image in bad:
        assert image["message"].startswith(f"{image['image']}: ")
        assert image["labels"] is None
    written = {str(path.relative_to(cwd)) for path in (cwd / "out/labels").iterdir()}
    assert written == {image["labels"] for image in good}


@pytest.mark.filterwarnings("ignore")  # Pillow may warn about damaged metadata
def test_40_damaged_files_end_in_results_or_messages(model: Path, cwd: Path) -> None:
    damaged(model, cwd, 40, seed=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_500_damaged_files_end_in_results_or_messages(model: Path, cwd: Path) -> None:
    damaged(model, cwd, 500, seed=1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in other units elsewhere")
def test_an_image_of_10000_x_8000_takes_less_than_4_gb(cwd: Path) -> None:
    varied_model(19, decoder=False).save_pretrained(cwd / "model")
    small = Image.fromarray(scene(0, 320, 400).permute(1, 2, 0).numpy())
    small.resize((10_000, 8_000), Image.Resampling.BICUBIC).save(cwd / "huge.jpg", quality=90)
    peak = peak_memory(cwd / "model", "huge.jpg", "--out", "out", "--json", "out.json")
    assert 0.3e9 < peak < 4e9
    (image,) = json.loads((cwd / "out.json").read_text())["images"]
    assert image["size"] == [8000, 10_000]
    assert image["tiled"]
    labels = values(cwd / "out/labels/huge.png")
    assert labels.shape == (8000, 10_000)
    assert len(np.unique(labels)) > 1
    with Image.open(cwd / "out/overlays/huge.jpg") as image:
        assert image.size == (10_000, 8000)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in other units elsewhere")
def test_180_photos_of_mixed_sizes_take_as_much_memory_as_the_first_60(model: Path, cwd: Path) -> None:
    """No two photos have the same size, and the first one is the largest."""
    peaks = []
    for number in (60, 180):
        directory = cwd / str(number)
        directory.mkdir()
        for k in range(number):
            size = (400 - k, 300 - 7 * k % 200)
            Image.linear_gradient("L").resize(size).convert("RGB").save(directory / f"{k:03}.jpg")
        peaks.append(peak_memory(model, str(number), "--out", f"out-{number}"))
        assert len(list((cwd / f"out-{number}/labels").iterdir())) == number
    assert peaks[1] < peaks[0] + 40e6  # the scores of 120 photos take 210 MB
