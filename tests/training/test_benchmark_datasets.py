"""The recipes of ADE20K and PASCAL VOC 2012 train a small model on small trees, which is then evaluated."""

import json
from pathlib import Path

import pytest

from caaseg.cli import main
from caaseg.data.catalogue import DATASETS
from caaseg.data.datasets import voc2012
from caaseg.data.prepare.convert import convert
from tests.data import trees
from tests.training.small import SMALL_ARGUMENTS

OPTIONS = (
    *(*SMALL_ARGUMENTS, "--steps", "2"),
    *("--model.pretrained", "false", "--precision", "32", "--data.crop", "32", "32"),
)


def train(name: str, root: Path, run: Path) -> int:
    recipe = f"{name}/caa_aux_resnet101_s8"
    return main(["train", recipe, "--data.root", str(root), "--device", "cpu", "--out", str(run), *OPTIONS])


def evaluated_pixels(name: str, root: Path, run: Path) -> int:
    """Return the number of labeled pixels of the validation split that were evaluated."""
    scores = run / "scores.json"
    assert main(["evaluate", str(run), "--dataset", name, "--root", str(root), "--json", str(scores)]) == 0
    return sum(sum(row) for row in json.loads(scores.read_text())["confusion"])


def test_a_small_model_is_trained_and_evaluated_on_ade20k(tmp_path: Path) -> None:
    trees.ade20k(tmp_path / "data")  # with grayscale and very small images
    assert train("ade20k", tmp_path / "data", tmp_path / "run") == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["classes"] == list(DATASETS["ade20k"].classes)
    assert evaluated_pixels("ade20k", tmp_path / "data", tmp_path / "run") == 12 * 16 * 3 // 4 + 4


def test_a_small_model_is_trained_on_train_aug_and_evaluated_on_voc2012(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    trees.voc2012(root)
    assert train("voc2012", root, tmp_path / "run") == 2
    assert "trainaug.txt: no such file; expected the split's list of names; run caaseg data prepare voc2012 --root" in (
        capsys.readouterr().err
    )
    trees.sbd(root)
    todo = voc2012.conversion(root)
    assert todo is not None
    convert(todo, trees.no_progress)
    assert train("voc2012", root, tmp_path / "run") == 0
    assert evaluated_pixels("voc2012", root, tmp_path / "run") == 12 * 16 * 3 // 4
