"""Recipes: files, table rows, overrides, the commands about them, and every message for a bad one."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from caaseg.cli import main, parse
from caaseg.config import Architecture, ModelConfig, Recipe
from caaseg.data.catalogue import find
from caaseg.models import Segmenter
from caaseg.models.saving import SHIPPED, read_config
from caaseg.recipes import load_recipe, recipe_names, recipe_text, row_names
from caaseg.settings import flat_fields

GOOD = "model: {head: fcn}\ndata: {dataset: scenes}\n"


def config_of(recipe: Recipe) -> ModelConfig:
    classes = len(find(recipe.data.dataset).classes) or 3
    architecture = {name: getattr(recipe.model, name) for name in Architecture.model_fields}
    return ModelConfig(**architecture, num_classes=recipe.model.num_classes or classes)


@cache
def build(config: ModelConfig) -> Segmenter:
    """Return a model without memory for its weights; several recipes have the same."""
    with torch.device("meta"):
        return Segmenter(config)


SLOW = re.compile("efficientnet|xception|convnext|dinov2|^car/caa")  # backbones that take seconds to build
RECIPES = [
    pytest.param(name, marks=pytest.mark.slow if SLOW.search(name) else ()) for name in (*recipe_names(), *row_names())
]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_and_table_row_is_complete_and_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    model = build(config_of(recipe))
    assert model.classifier.out_channels == (len(find(recipe.data.dataset).classes) or 3)
    assert model.backbone.name == recipe.model.backbone
    assert model.config.head == recipe.model.head


def test_options_replace_the_initial_weights_of_a_recipe_and_the_architecture_that_belongs_to_them() -> None:
    shipped = load_recipe("folder/finetune")
    camvid = read_config(SHIPPED / "camvid" / "config.json")
    assert shipped.init_from == "camvid"
    assert {name: getattr(shipped.model, name) for name in Architecture.model_fields} == {
        name: getattr(camvid, name) for name in Architecture.model_fields
    }
    from_imagenet = load_recipe("folder/finetune", ["--model.pretrained", "true"])
    assert shipped.differences(from_imagenet) == {"init_from": ("camvid", None), "model.pretrained": (False, True)}
    from_random = load_recipe("folder/finetune", ["--init-from", "none"])
    assert shipped.differences(from_random) == {"init_from": ("camvid", None)}
    from_mine = load_recipe("folder/finetune", ["--init-from", "runs/mine", "--model.output-stride", "16"])
    assert from_mine.init_from == "runs/mine"
    assert from_mine.model.model_fields_set == {"output_stride"}  # the model decides about all others


def test_there_are_about_a_dozen_recipe_files() -> None:
    assert 10 <= len(recipe_names()) <= 18


def test_a_value_is_the_default_then_the_file_then_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "steps: 7\noptimizer: {lr: 1e-3}\n")
    recipe = load_recipe(path)
    assert (recipe.model.head, recipe.steps, recipe.optimizer.lr, recipe.batch_size) == ("fcn", 7, 0.001, 16)
    arguments = [
        "--steps=9",
        "--model.output-stride",
        "8",
        "--data.crop",
        "[32, 64]",
        "--optimizer.clip_grad_norm",
        "null",
    ]
    changed = load_recipe(path, arguments)
    assert (changed.steps, changed.model.output_stride, changed.data.crop, changed.model.head) == (
        9,
        8,
        (32, 64),
        "fcn",
    )
    assert set(recipe.differences(changed)) == {"steps", "model.output_stride", "data.crop"}


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--deterministic --steps 5", "deterministic", True),
        ("--deterministic --steps 5", "steps", 5),
        ("--deterministic true", "deterministic", True),
        ("--channels_last false", "channels_last", False),
        ("--data.crop 64 48", "data.crop", (64, 48)),
        ("--data.crop 64x48", "data.crop", (64, 48)),
        ("--data.crop 64", "data.crop", (64, 64)),
        ("--data.root none", "data.root", None),
        ("--data.root some/where", "data.root", "some/where"),
        ("--data.scales 0.75 1.5", "data.scales", (0.75, 1.5)),
        ("--data.scenes.difficulty hard", "data.scenes.difficulty", "hard"),
        ("--model.pretrained true", "model.pretrained", True),
        ("--model.pretrained weights.pt", "model.pretrained", "weights.pt"),
        ("--model.multi-grid 1 2 4", "model.multi_grid", (1, 2, 4)),
        ("--model.head mine.py:Head", "model.head", "mine.py:Head"),
        ("--loss.class_weights none", "loss.class_weights", "none"),
        ("--loss.class-weights 1 2.5", "loss.class_weights", (1.0, 2.5)),
        ("--optimizer.ema 0.999", "optimizer.ema", 0.999),
        ("--optimizer.lr 1e-3", "optimizer.lr", 0.001),
        ("--precision 16", "precision", "16"),
    ],
)
def test_options_are_read_as_the_type_of_their_value(arguments: str, key: str, value: object) -> None:
    found: object = load_recipe("folder/caa_resnet18", arguments.split())
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_options_may_come_before_the_recipe() -> None:
    _, arguments = parse(["train", "--deterministic", "--data.crop", "64", "64", "scenes/caa_resnet18", "--steps", "3"])
    assert arguments["recipe"] == "scenes/caa_resnet18"
    assert load_recipe("scenes/caa_resnet18", arguments["overrides"]).data.crop == (64, 64)


@pytest.mark.parametrize(
    "name", [*recipe_names(), "table1/caa_gate3x128", "appendix/caa_efficientnet_b5_coco_stuff_164k"]
)
def test_a_saved_recipe_loads_to_the_same_values(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, ["--loss.class_weights", "1,2.5", "--model.multi_grid", "1", "2", "--precision", "16"])
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_row_is_its_base_recipe_with_the_changes_of_the_table() -> None:
    base, row = load_recipe("pascal_context/caa_resnet101_s16"), load_recipe("table1/caa_gate3x128")
    assert base.differences(row) == {"model.gate_layers": (5, 3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {heed: caa}\ndata: {dataset: scenes}", "unknown key model.heed; did you mean model.head?"),
        (GOOD + "stepps: 3", "unknown key stepps; did you mean steps?"),
        (GOOD + "lr: 3", "unknown key lr; did you mean optimizer.lr?"),
        (GOOD + "zzzzzz: 3", "unknown key zzzzzz"),
        (GOOD + "optimiser: {lr: 1}", "unknown key optimiser; did you mean optimizer?"),
        (GOOD + "fused_normalisation: true", "unknown key fused_normalisation; did you mean fused_batch_norm?"),
        (GOOD + "optimizer: {clip: 1}", "unknown key optimizer.clip; did you mean optimizer.clip_grad_norm?"),
        ("data: {dataset: scenes, keep: true}", "unknown key data.keep; did you mean data.cache?"),
        ("data: {dataset: scenes, options: {}}", "unknown key data.options; did you mean data.scenes or data.folder?"),
        (
            "data: {dataset: scenes}\nmodel: {enlarge: 2}",
            "unknown key model.enlarge; did you mean model.input_upsampling?",
        ),
        (GOOD + "steps: many", "steps is 'many'; expected a valid integer"),
        (GOOD + "compile: 3", "compile is 3; expected a valid boolean"),
        (
            GOOD + "optimizer: {clip_grad_norm: big}",
            "optimizer.clip_grad_norm is 'big'; expected a valid number",
        ),
        (
            GOOD + "optimizer: {schedule: step}",
            "optimizer.schedule is 'step'; expected 'poly', 'cosine' or 'exponential'",
        ),
        ("data: {dataset: scenes, crop: 64}", "data.crop is 64; expected a list of values"),
        ("data: {dataset: scenes}\nmodel: {output_stride: 4}", "model.output_stride is 4; expected 8, 16 or 32"),
        ("data: {dataset: scenes, cache: much}", "data.cache is 'much'; expected a valid boolean"),
        (
            "data: {dataset: scenes}\nmodel: {stages: all}",
            "model.stages is 'all'; expected a valid integer",
        ),
        (
            "data: {dataset: scenes}\nmodel: {input_upsampling: 9}",
            "model.input_upsampling is 9; expected less than or equal to 4",
        ),
        ("data: {dataset: scenes}\nmodel: {head: caaa}", "model.head is 'caaa'; expected fcn, axial"),
        ("data: {dataset: scenes}\nmodel: 3", "model is 3; expected a valid dictionary or instance of ModelRecipe"),
        ("model: {head: caa}", "data.dataset is missing: Dataset name; caaseg data list shows all."),
        ("data: {flip: 1}", "data.dataset is missing: Dataset name; caaseg data list shows all."),
        (GOOD + "accumulate: 3", "batch_size is 16; expected a multiple of accumulate, 3"),
        ("model: {head: caa", "cannot be read as YAML"),
        ("- 1", "the content is [1]; expected a valid dictionary or instance of Recipe"),
        ("", "the content is None; expected a valid dictionary or instance of Recipe"),
        ("\x00", "cannot be read as YAML"),
        (f"{GOOD}a: &a [*a]", "cannot be read as YAML (aliases are not supported in"),
        (f"model: {'[' * 3000}{']' * 3000}", "cannot be read as YAML (nested more than 20 deep);"),
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
    ("arguments", "message"),
    [
        (["--model.heed", "caa"], "unknown option --model.heed; did you mean --model.head?"),
        (["--lr", "3"], "unknown option --lr; did you mean --optimizer.lr?"),
        (["--stesp", "4"], "unknown option --stesp; did you mean --steps?"),
        (
            ["--epochs", "4", "--steps", "9"],
            "--steps and --epochs are both set, but epochs determines steps; leave out",
        ),
        (["--data.keep"], "unknown option --data.keep; did you mean --data.cache?"),
        (["--steps", "many"], "--steps is 'many'; expected a valid integer"),
        (["--model.output-stride=4"], "--model.output-stride is 4; expected 8, 16 or 32"),
        (["--model.head", "cac"], "--model.head is 'cac'; expected fcn, axial, axial_se, caa, "),
        (["--batch_size", "0"], "--batch-size is 0; expected greater than or equal to 1"),
        (["--data.flip", "7"], "--data.flip is 7; expected less than or equal to 1"),
        (["--data.crop", "0", "0"], "--data.crop is [0, 0]; expected greater than or equal to 1"),
        (["--data.scales", "2", "0.5"], "--data.scales is [2, 0.5]; expected the smallest, then the largest"),
        (["--accumulate", "3"], "--batch-size is 8; expected a multiple of accumulate, 3"),
        (["--data.dataset", "camvidd"], "no dataset is called 'camvidd'; expected any of pascal_context"),
        (["--data.dataset", "camvid"], "data.root is missing: camvid needs the directory of its files"),
        (
            ["--data.dataset", "camvid", "--data.root", "nowhere"],
            "data.root is nowhere: no such directory",
        ),
        (["--data.scenes.sizes", "3"], "unknown option --data.scenes.sizes; did you mean --data.scenes.size?"),
        (["--data.val_split", "valid"], "scenes: split is 'valid'; expected any of train, val, test"),
        (["--model.num_classes", "5"], "model.num_classes is 5, but split train of scenes has 8 classes; omit it"),
        (["--loss.class_weights", "1", "2"], "loss.class_weights has 2 numbers, but the dataset has 8 classes"),
        (["--model.backbone", "resnet9"], "backbone 'resnet9' is not a timm model; did you mean"),
        (["--precision", "16", "--device", "cpu"], "precision is 16, which needs a GPU; use bf16 or 32 on a CPU"),
        (["--model.implementation", "fused", "--device", "cpu"], "implementation is fused, which needs a GPU, but the"),
        (["--accumulate", "8"], "each forward pass has 1 crop, but the image-level branch of CAAHead needs 2 or more"),
        (["--devices", "3", "--device", "cpu"], "batch_size is 8; expected a multiple of 3, 3 processes times 1"),
        (["--resume", "gone.pt"], "gone.pt: no such checkpoint"),
        (["--init-from", "/no/such/model"], "/no/such/model: no such model; expected a run, a model directory"),
    ],
)
def test_a_bad_command_line_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "scenes/caa_resnet18", "--out", str(tmp_path / "run"), *arguments]) == 2
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
    assert [line.split()[0] for line in lines] == [*recipe_names(), *row_names()]
    assert all(len(line.split()) > 1 for line in lines)


@pytest.mark.parametrize("name", ["scenes/demo_caa", "table5/caa_efficientnet_b7_s8"])
def test_a_recipe_is_shown_and_copied_with_every_value(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "show", name]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown) == load_recipe(name).as_dict()
    assert ("# The stride of this table is that of the evaluation. The paper does not" in shown) == ("table5" in name)
    file = tmp_path / "new" / "mine.yaml"
    assert main(["recipes", "copy", name, str(file)]) == 0
    assert file.read_text() == shown
    assert load_recipe(file) == load_recipe(name)
    capsys.readouterr()
    assert main(["recipes", "copy", name, str(file)]) == 2
    assert f"{file}: exists already; give the name of a new file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "caaseg recipes show needs NAME; caaseg recipes lists all names"),
        (["copy", "scenes/demo_caa"], "caaseg recipes copy needs NAME and FILE, the new YAML file"),
        (["shwo"], "ACTION is 'shwo'; expected 'list', 'show' or 'copy'; did you mean show?"),
        (["show", "table1/caa_gate3x12"], "recipe 'table1/caa_gate3x12' is neither a file nor the name of a shipped"),
    ],
)
def test_a_bad_recipes_command_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_explains_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for key in flat_fields(Recipe):
        assert f"--{key.replace('_', '-')} " in text
    assert "--model.output-stride {8,16,32} Stride of the features that the head reads. (default: 16)" in text
    assert "--optimizer.warmup-steps INT Steps of linear warmup from 0. (default: 0)" in text
    assert "default: 40000)" in text
