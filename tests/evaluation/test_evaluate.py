"""Evaluation: scores and counts in one process and in two, and the command."""

import json
import math
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import one_hot

import caaseg
from caaseg.cli import main
from caaseg.data.catalogue import DATASETS
from caaseg.data.datasets import cityscapes
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE, BadFileError, Batch, Color, Sample
from caaseg.data.transforms import normalize
from caaseg.evaluation.evaluate import Evaluation
from caaseg.reports.evaluation import describe_data, describe_protocol, score_lines, score_table
from tests.data import trees
from tests.processes import exit_with_command, run_ranks


def build(num_classes: int = 8, **options: Any) -> caaseg.Segmenter:
    torch.manual_seed(0)
    small: dict[str, Any] = {"channels": 16, "key_channels": 4, "gate_width": 8}
    model = caaseg.create_model("caa", backbone="test_resnet", num_classes=num_classes, **{**small, **options})
    model(torch.randn(2, 3, 33, 33))  # updates the initial batch norm statistics
    nn.init.normal_(model.classifier.weight)  # so that more than one class is predicted
    return model.eval()


def scenes(length: int = 3) -> Scenes:
    return Scenes("val", length=length, size=(64, 64))


class Oracle(nn.Module):
    """Returns the labels of the images of a dataset."""

    def __init__(self, dataset: Scenes) -> None:
        super().__init__()
        self.known = [(normalize(sample.image[None])[0], sample.label) for sample in (dataset[k] for k in range(3))]
        self.num_classes = len(dataset.classes)

    def forward(self, images: Tensor) -> Tensor:
        labels = torch.stack([next(label for known, label in self.known if torch.equal(known, i)) for i in images])
        classes = labels.to(torch.int64) % IGNORE  # any class where the label is ignored
        return one_hot(classes, self.num_classes).permute(0, 3, 1, 2).float()


def test_correct_predictions_score_100_percent() -> None:
    evaluation = caaseg.evaluate(Oracle(scenes()), scenes(), boundary=True, batch_size=2)
    assert evaluation.mean_iou == evaluation.pixel_accuracy == evaluation.mean_accuracy == 1
    assert evaluation.mean_boundary_iou == 1
    assert evaluation.classes == Scenes.classes
    assert evaluation.images == 3
    labeled = sum(int((scenes()[k].label != IGNORE).sum()) for k in range(3))
    assert evaluation.confusion.sum() == evaluation.confusion.diagonal().sum() == labeled


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_counts_equal_a_plain_loop(batch_size: int, workers: int) -> None:
    model, data = build(), scenes()
    expected = torch.zeros(8, 8, dtype=torch.int64)
    for sample in (data[k] for k in range(3)):
        with torch.no_grad():
            logits = model(normalize(sample.image[None], (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))).logits
        for truth, found in zip(sample.label.flatten().tolist(), logits.argmax(1).flatten().tolist(), strict=True):
            if truth != IGNORE:
                expected[truth, found] += 1
    evaluation = caaseg.evaluate(model, data, batch_size=batch_size, workers=workers)
    assert torch.equal(evaluation.confusion, expected)
    assert (expected.sum(0) > 0).sum() > 1
    assert evaluation.boundary_iou is None
    assert evaluation.mean_boundary_iou is None


def test_a_predictor_is_evaluated_with_its_settings() -> None:
    predictor = caaseg.Predictor(build(), scales=(0.5, 1.0), flip=True, window=(48, 48))
    expected = torch.zeros(8, 8, dtype=torch.int64)
    for sample in (scenes()[k] for k in range(3)):
        found = torch.from_numpy(predictor(sample.image.permute(1, 2, 0).numpy())).to(torch.int64)
        labeled = sample.label != IGNORE
        expected += torch.bincount(sample.label[labeled] * 8 + found[labeled], minlength=64).view(8, 8)
    assert torch.equal(caaseg.evaluate(predictor, scenes()).confusion, expected)


def test_images_and_predictions_are_released_after_their_batch() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def check_released(batch: Batch, predictions: Tensor) -> None:
        nonlocal most
        alive.extend([weakref.ref(batch.images), weakref.ref(predictions)])
        most = max(most, sum(reference() is not None for reference in alive))

    caaseg.evaluate(build(), scenes(8), boundary=True, on_batch=check_released)
    assert len(alive) == 16
    assert most <= 4  # images and predictions of this batch and the previous one


class Odd:
    """Images of several sizes, one pixel among them."""

    classes: tuple[str, ...] = ("left", "right")
    palette: tuple[Color, ...] = ((0, 0, 0), (255, 255, 255))
    sizes = ((1, 1), (7, 33), (50, 31))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Sample:
        size = self.sizes[index]
        return Sample(torch.full((3, *size), 90, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8), str(index))


def test_images_of_any_size_are_scored_one_by_one() -> None:
    predictor = caaseg.Predictor(build(2), scales=(0.5, 1.0, 1.75), flip=True)
    evaluation = caaseg.evaluate(predictor, Odd(), boundary=True)
    assert evaluation.confusion.sum() == sum(height * width for height, width in Odd.sizes)
    with pytest.raises(ValueError, match="0 is 1 x 1 and 1 is 7 x 33: one batch needs one size"):
        caaseg.evaluate(predictor, Odd(), batch_size=2)


class Bad(Odd):
    def __getitem__(self, index: int) -> Sample:
        raise BadFileError("images/3.png: cut off; replace or remove the file")


class Empty(Odd):
    sizes = ()  # type: ignore[assignment]


class Greedy(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_errors_state_why_a_dataset_cannot_be_evaluated() -> None:
    with pytest.raises(ValueError, match="val-0-000000: 1 x 64 x 64 at scale 1 does not fit in the memory of cpu; use"):
        caaseg.evaluate(Greedy(), scenes())
    with pytest.raises(
        ValueError, match=r"has 5 classes, but the dataset has 8 \(meadow, water, sand, \.\.\.\); evaluate it on"
    ):
        caaseg.evaluate(build(5), scenes())
    with pytest.raises(ValueError, match=r"has 5 classes, but the dataset has 2 \(left, right\); evaluate"):
        caaseg.evaluate(build(5), Odd())
    with pytest.raises(BadFileError, match=r"images/3\.png: cut off"):
        caaseg.evaluate(build(2), Bad())
    with pytest.raises(ValueError, match="the dataset has no images to score"):
        caaseg.evaluate(build(2), Empty())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small CamVid and a model for it."""
    root = tmp_path_factory.mktemp("evaluate")
    trees.camvid(root / "camvid")
    model = build(11, classes=DATASETS["camvid"].classes, decoder=True)
    assert model.classifier.bias is not None
    model.classifier.bias.data += torch.tensor([1000.0 if k in (0, 5) else 0.0 for k in range(11)])  # both are labeled
    model.save_pretrained(root / "model")
    return root


def evaluate_arguments(root: Path, *options: str) -> list[str]:
    return ["evaluate", str(root / "model"), "--dataset", "camvid", "--root", str(root / "camvid"), *options]


def test_two_processes_count_every_image_once(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ["--split", "train", "--boundary", "--workers", "0", "--device", "cpu"]  # 3 images: 2 and 1
    assert main(evaluate_arguments(root, *common, "--json", str(tmp_path / "one.json"))) == 0
    capfd.readouterr()
    codes = run_ranks(exit_with_command, evaluate_arguments(root, *common, "--json", str(tmp_path / "two.json")))
    printed = capfd.readouterr()
    assert codes == [0, 0], printed.err
    assert printed.out.count("mean IoU") == 1  # one process prints
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for name in ("command", "seconds"):
        assert one.pop(name) != two.pop(name)
    assert one == two
    assert 0 < one["mean_boundary_iou"] < 1
    assert len({row["boundary_iou"] for row in one["classes"]}) > 2
    assert np.sum(one["confusion"]) == 3 * 12 * 16 * 3 / 4  # a quarter is ignored


def test_the_command_prints_scores_protocol_and_absent_classes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(evaluate_arguments(root, "--boundary", "--scales", "0.5, 1.0", "--flip", "--window", "9x9")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "│ 10 │" in printed
    assert "boundary IoU" in printed
    assert "CamVid, SegNet split (camvid, 11 classes), val: 2 images" in printed
    assert "scales 0.5, 1, with flipped images, windows of 9 x 9 with an overlap of 33%, logits averaged" in printed
    assert "output stride 16, float32" in printed
    assert re.search(r"mean IoU \d+\.\d\d, pixel accuracy \d+\.\d\d, mean accuracy \d+\.\d\d, mean boundary", printed)
    assert "a class that occurs in neither labels nor predictions has no IoU" in printed
    assert re.search(r"without accuracy: (?!none).*Pole", printed)  # the directory has classes 0, 5 and 10 only
    assert "class names of the model and the dataset differ" not in printed


def test_the_page_has_scores_confusions_and_images(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "page.html"
    assert main(evaluate_arguments(root, "--split", "train", "--workers", "0", "--page", str(page))) == 0
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text()
    assert "<h1>model</h1>" in text
    assert "CamVid, SegNet split (camvid, 11 classes), train: 3 images; scale 1, no flips" in text
    assert text.count('<td class="bar">') == 11
    assert "Confusion matrix" in text
    assert text.count('<div class="case">') == 3  # two of the best, one of the worst
    assert "http" not in re.sub(r"data:[^\"]*|http://www.w3.org[^\"]*", "", text)  # it needs no network


def test_two_processes_cannot_write_a_page(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = evaluate_arguments(root, "--device", "cpu", "--page", str(tmp_path / "page.html"))
    assert run_ranks(exit_with_command, arguments) == [2, 2]
    assert "--page needs all images, but 2 processes share them; start one process" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_json_output_has_all_scores(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--output-stride", "8", "--precision", "bf16", "--workers", "0", "--json", "-"]
    assert main(evaluate_arguments(root, *options)) == 0
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert "mean IoU" in captured.err
    assert content["protocol"] == "scale 1, no flips, whole images, output stride 8, bf16"
    assert content["images"] == 2
    assert len(content["confusion"]) == len(content["classes"]) == 11
    assert content["classes"][1]["accuracy"] is None  # not in the labels
    assert content["mean_boundary_iou"] is None
    matrix = np.array(content["confusion"])
    assert content["pixel_accuracy"] == pytest.approx(np.trace(matrix) / matrix.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scales", "1.0,big"], "--scales is ['1.0', 'big']; expected a valid number"),
        (["--scales", "0"], "--scales is [0]; expected greater than 0"),
        (["--window", "5x6x7"], "--window is '5x6x7'; expected at most 2 items"),
        (["--split", "trial"], "camvid"),
        (["--dataset", "camvids"], "no dataset is called 'camvids'; expected any of pascal_context, "),
        (["--dataset", "scenes"], "the model has 11 classes, but the dataset has 8 (meadow, water, sand, ...)"),
        (["--submission", "out"], "--submission is for the Cityscapes server, but --dataset is camvid; leave it out"),
        (["--batch-size", "0"], "--batch-size is 0; expected greater than or equal to 1"),
        (["--workers", "-1"], "--workers is -1; expected greater than or equal to 0"),
    ],
)
def test_invalid_options_end_with_one_message(
    root: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(evaluate_arguments(root, *options)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_errors_name_a_missing_model_or_root(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert main(["evaluate", "model", "--dataset", "camvid"]) == 2
    assert "camvid needs the directory of its files; give it as --root" in capsys.readouterr().err
    assert main(["evaluate", "camvid/train", "--dataset", "camvid", "--root", "camvid"]) == 2
    assert "camvid/train: contains no model; expected a directory with config.json" in capsys.readouterr().err


def test_different_class_names_of_model_and_dataset_are_reported(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(11, classes=[f"class {k}" for k in range(11)]).save_pretrained(tmp_path)
    assert main(["evaluate", str(tmp_path), *evaluate_arguments(root, "--workers", "0")[2:]]) == 0
    assert "the class names of the model and the dataset differ" in " ".join(capsys.readouterr().out.split())


def test_a_cityscapes_submission_has_label_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "bonn_000000_000019"
    trees.save_image(tmp_path / f"leftImg8bit/test/bonn/{name}_leftImg8bit.png", height=1024, width=2048)
    model = build(19)
    model.save_pretrained(tmp_path / "model")
    arguments = ["--dataset", "cityscapes", "--root", str(tmp_path), "--split", "test", "--workers", "0"]
    assert main(["evaluate", str(tmp_path / "model"), *arguments, "--submission", str(tmp_path / "out")]) == 0
    assert "No pixel of this split is labeled, so there are no scores." in capsys.readouterr().out
    with Image.open(tmp_path / "out" / f"{name}_prediction.png") as written:
        found = np.array(written)
    expected = caaseg.Predictor(model)(tmp_path / f"leftImg8bit/test/bonn/{name}_leftImg8bit.png")
    assert np.array_equal(found, np.array(cityscapes.CLASSES.values)[expected])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "scale 1, no flips, whole images, output stride 8, float32"),
        ({"flip": True}, "scale 1, with flipped images, whole images, logits averaged, output stride 8, float32"),
        (
            {"window": (9, 7), "average": "probabilities", "overlap": 0.5},
            "scale 1, no flips, windows of 9 x 7 with an overlap of 50%, probabilities averaged, "
            "output stride 8, float32",
        ),
    ],
)
def test_the_protocol_states_whether_logits_or_probabilities_are_averaged(options: dict[str, Any], text: str) -> None:
    assert describe_protocol(caaseg.Predictor(nn.Identity(), **options), 8) == text


def test_the_protocol_distinguishes_59_and_60_classes() -> None:
    for name, number, how in (("pascal_context", 59, "ignored"), ("pascal_context_60", 60, "scored")):
        text = describe_data(name, "val", evaluation_of(DATASETS[name].classes))
        assert text == f"PASCAL Context, background {how} ({name}, {number} classes), val: 4 images"


def evaluation_of(classes: tuple[str, ...]) -> Evaluation:
    nothing = (math.nan,) * len(classes)
    return Evaluation(
        classes=classes,
        confusion=torch.eye(len(classes), dtype=torch.int64),
        mean_iou=1.0,
        pixel_accuracy=1.0,
        mean_accuracy=1.0,
        iou=(1.0, *nothing[1:]),
        accuracy=(1.0, *nothing[1:]),
        mean_boundary_iou=None,
        boundary_iou=None,
        images=4,
        seconds=2.0,
    )


def test_classes_without_a_score_are_empty_and_listed() -> None:
    evaluation = evaluation_of(("cat", "[dog]", "hen"))
    assert list(score_table(evaluation).columns[2].cells) == ["100.00", "", ""]
    assert score_lines(evaluation, "cats", "at once")[-1].endswith(
        "Without IoU: [dog], hen; without accuracy: [dog], hen."
    )
    assert score_lines(evaluation, "cats", "at once")[0] == "cats; 2.0 s, 2 images per second"
