"""Recipes as files: every message for a bad one, and that every shipped one can be loaded and built."""

import re
from pathlib import Path

import pytest
import torch

from caaseg.cli import main
from caaseg.config import ModelConfig
from caaseg.data.catalogue import find
from caaseg.models import Segmenter
from caaseg.recipes import differences, load_recipe, recipe_names, save_recipe

GOOD = "model: {head: fcn}\ndata: {dataset: scenes}\n"


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_loads_and_builds(name: str) -> None:
    recipe = load_recipe(name)
    classes = len(find(recipe.data.dataset).classes) or 3
    with torch.device("meta"):
        config = {key: value for key, value in vars(recipe.model).items() if key not in ("num_classes", "pretrained")}
        model = Segmenter(ModelConfig(**config, num_classes=recipe.model.num_classes or classes))
    assert model.classifier.out_channels == classes
    assert model.backbone.name == recipe.model.backbone


def test_a_value_is_the_default_then_the_file_then_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "steps: 7\noptimizer: {lr: 1e-3}\n")
    recipe = load_recipe(path)
    assert (recipe.model.head, recipe.steps, recipe.optimizer.lr, recipe.batch_size) == ("fcn", 7, 0.001, 16)
    words = ["--steps=9", "--model.output-stride", "8", "--data.crop", "[32, 64]", "--optimizer.clip_grad_norm", "null"]
    changed = load_recipe(path, words)
    assert (changed.steps, changed.model.output_stride, changed.data.crop, changed.model.head) == (
        9,
        8,
        (32, 64),
        "fcn",
    )
    assert set(differences(recipe, changed)) == {"steps", "model.output_stride", "data.crop"}


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_saved_is_what_is_loaded(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(
        name, ["--loss.class_weights", "[1, 2.5]", "--model.multi_grid", "[1, 2]", "--precision", "16"]
    )
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {heed: caa}\ndata: {dataset: scenes}", "unknown key model.heed; did you mean model.head?"),
        (GOOD + "stepps: 3", "unknown key stepps; did you mean steps?"),
        (GOOD + "lr: 3", "unknown key lr; did you mean optimizer.lr?"),
        (GOOD + "zzzzzz: 3", "unknown key zzzzzz; caaseg train --help lists all"),
        (GOOD + "steps: many", "steps is many; expected a whole number"),
        (GOOD + "compile: 3", "compile is 3; expected true or false"),
        (GOOD + "optimizer: {clip_grad_norm: big}", "optimizer.clip_grad_norm is big; expected a number, or null"),
        (GOOD + "optimizer: {schedule: step}", "optimizer.schedule is step; expected poly or cosine"),
        ("data: {dataset: scenes, crop: 64}", "data.crop is 64; expected a list of 2 whole numbers"),
        ("data: {dataset: scenes}\nmodel: {output_stride: 32}", "model.output_stride is 32; expected 8 or 16"),
        ("data: {dataset: scenes, cache: much}", "data.cache is much; expected true or false"),
        ("data: {dataset: scenes}\nmodel: {stages: all}", "model.stages is all; expected a whole number, or null"),
        (
            "data: {dataset: scenes}\nmodel: {input_upsampling: 9}",
            "input_upsampling is 9.0; expected a factor from 1 to 4",
        ),
        ("data: {dataset: scenes}\nmodel: {head: caaa}", "head is 'caaa' (did you mean caa?); expected one of fcn"),
        ("data: {dataset: scenes}\nmodel: 3", "model is 3; expected keys and values below it"),
        ("model: {head: caa}", "data.dataset is missing; expected a name of caaseg data list"),
        (GOOD + "accumulate: 3", "batch_size is 16, which 3 accumulation steps do not divide evenly"),
        ("model: {head: caa", "cannot be read as YAML"),
        ("- 1", "holds list; expected a recipe's keys: model, data, steps, ..."),
        ("", "holds NoneType; expected a recipe's keys"),
        ("\x00", "cannot be read as YAML"),
    ],
)
def test_a_bad_recipe_is_one_message_and_exit_code_2(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"caaseg: {path}: {message}")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.heed", "caa"], "unknown option --model.heed; did you mean --model.head?"),
        (["--lr", "3"], "unknown option --lr; did you mean --optimizer.lr?"),
        (["--steps", "many"], "command line: steps is many; expected a whole number"),
        (["--model.output-stride=4"], "command line: model.output_stride is 4; expected 8 or 16"),
        (["--batch_size", "0"], "command line: batch_size is 0; expected 1 or more"),
        (["--data.dataset", "camvidd"], "no dataset is called 'camvidd'; expected any of pascal_context"),
        (["--data.dataset", "camvid"], "data.root is missing: camvid needs the directory of its files"),
        (
            ["--data.dataset", "camvid", "--data.root", "nowhere", "--data.options", "{}"],
            "data.root is nowhere: no such directory",
        ),
        (["--data.options", "{sizes: 3}"], "data.options is {'sizes': 3}, which scenes does not accept: "),
        (["--data.val_split", "valid"], "scenes: split is 'valid'; expected any of train, val, test"),
        (["--model.num_classes", "5"], "model.num_classes is 5, but split train of scenes has 8 classes; omit it"),
        (["--loss.class_weights", "[1, 2]"], "loss.class_weights has 2 numbers, but the dataset has 8 classes"),
        (["--model.backbone", "resnet9"], "backbone 'resnet9' is not a timm model; did you mean"),
        (["--precision", "16", "--device", "cpu"], "precision is 16, which needs a GPU; use bf16 or 32 on a CPU"),
        (["--accumulate", "8"], "each forward pass has 1 crop, but the image-level branch of CAAHead needs 2 or more"),
        (["--devices", "3", "--device", "cpu"], "batch_size is 8; expected a multiple of 3, 3 processes times 1"),
        (["--resume", "gone.pt"], "gone.pt: no such checkpoint"),
        (["--init-from", "/no/such/model"], "/no/such/model: no such directory"),
    ],
)
def test_a_bad_command_line_is_one_message_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "scenes/caa_resnet18", "--out", str(tmp_path / "run"), *words]) == 2
    said = capsys.readouterr().err
    assert re.match(rf"caaseg: .*{re.escape(message)}", said), said
    assert not (tmp_path / "run").exists()


def test_an_unknown_recipe_has_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "scenes/caa_resnet81"]) == 2
    assert "is neither a file nor the name of a shipped recipe; did you mean scenes/caa_resnet18?" in (
        capsys.readouterr().err
    )


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 1 for line in lines)


def test_help_explains_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--model.output-stride {8,16} How many pixels a feature of the head stands for: 8 or 16." in text
    assert "--optimizer.warmup-steps WARMUP_STEPS Steps in which the learning rate rises from 0." in text
    assert "(type: int, default: 40000)" in text
