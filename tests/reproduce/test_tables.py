"""The paper's tables as data: rows, baselines and numbers."""

from pathlib import Path

import pytest
import torch

from caaseg.config import HEAD_NAMES, Architecture, ModelConfig
from caaseg.models import Segmenter
from caaseg.recipes import load_recipe, recipe_names, row_names
from caaseg.reproduce.grid import plan_grid
from caaseg.reproduce.published import NUMBERS
from caaseg.reproduce.tables import BASES, ROWS, TABLES


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_values_that_the_table_studies(name: str) -> None:
    table, _, row_name = name.partition("/")
    row = next(row for row in TABLES[table].rows if row.name == row_name)
    recipe = load_recipe(name)
    assert recipe.data.dataset == row.dataset
    assert {key: getattr(recipe.model, key) for key in row.model} == dict(row.model)
    assert set(load_recipe(ROWS[name][0]).differences(recipe)) <= {
        *(f"model.{key}" for key in {**row.model, **row.paper_model}),
        *(option[2:].partition("=")[0] for option in row.paper_options),
    }


MMSEG = ("ade20k", "voc2012")
"""Tables with the settings and numbers of mmsegmentation."""
PAPER_DATASETS = {row.dataset for table in TABLES.values() for row in table.rows if row.dataset}


@pytest.mark.parametrize("name", [*ROWS, *(name for name in recipe_names() if name.split("/")[0] in PAPER_DATASETS)])
def test_a_paper_recipe_is_deterministic_and_names_pretrained_weights_of_imagenet_1k(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.deterministic
    assert recipe.model.pretrained is True
    model, _, tag = recipe.model.backbone.partition(".")
    assert tag.endswith("_in1k") or "dinov2" in model  # without a tag, the weights change between versions of timm
    assert "jft" not in tag
    assert "in22k" not in tag or model == "convnext_large"  # which CAR uses


def test_every_row_of_the_paper_is_a_recipe() -> None:
    rows = [f"{name}/{row.name}" for name, table in TABLES.items() for row in table.rows if row.dataset]
    assert rows == row_names() == list(ROWS)
    assert len(rows) == 111


@pytest.mark.parametrize("name", TABLES)
def test_rows_have_unique_names_and_existing_baselines(name: str) -> None:
    rows = {row.name: row for row in TABLES[name].rows}
    assert len(rows) == len(TABLES[name].rows)
    for row in rows.values():
        assert row.baseline is None or rows[row.baseline].dataset == row.dataset
        assert (
            row.paper or name in ("heads", "camvid_ideas", "result_figure", *MMSEG) or row.name == "caa_gate5x128_relu"
        )
    assert any(row.baseline for row in rows.values())


def test_the_numbers_agree_with_the_text_of_the_paper() -> None:
    def number(table: str, row: str) -> float:
        return next(r for r in TABLES[table].rows if r.name == row).paper["single"].mean

    # "improve the performance of self-attention by 0.67% (51.09% vs 50.42%)"
    gain = number("table3", "channelized_self_attention") - number("table3", "self_attention")
    assert round(gain, 2) == 0.67
    for table in ("table1", "table2", "table3"):
        assert number(table, "axial") == number("table4", "axial_s16") == 50.27
    gates = {row.name: number("table1", row.name) for row in TABLES["table1"].rows if "single" in row.paper}
    assert max(gates, key=lambda name: gates[name]) == "caa_gate5x128"  # "the best performance is achieved when ..."
    assert gates["caa_gate5x128"] == number("table2", "caa") == number("table3", "caa") == number("table4", "caa_s16")
    ours = next(row for row in TABLES["state_of_the_art"].rows if row.name == "caa_aux_s8_coco_stuff_10k")
    others = [quoted.mean for quoted in TABLES["state_of_the_art"].quoted if quoted.dataset == "coco_stuff_10k"]
    assert round(ours.paper["multi"].mean - max(others), 1) == 1.3  # "by a large margin of 1.3%"


@pytest.mark.parametrize("name", [name for name in ROWS if "/danet" in name and not name.startswith(MMSEG)])
def test_danet_has_the_losses_of_its_two_branches_and_none_on_the_backbone(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.model.head, recipe.model.aux, recipe.loss.branch_weight) == ("danet", False, 1.0)


@pytest.mark.parametrize("dataset", MMSEG)
def test_rows_in_the_settings_of_mmsegmentation(dataset: str) -> None:
    rows = [row for row in TABLES[dataset].rows if row.paper]
    assert len(rows) == sum(map(len, NUMBERS[dataset].values()))
    assert len({row.source for row in rows}) == len(rows)
    for row in rows:
        recipe = load_recipe(f"{dataset}/{row.name}")
        assert recipe.steps == int(row.name.rpartition("_")[2].removesuffix("k")) * 1000
        assert f"-{recipe.steps // 1000}k_" in (row.source or "")
        assert (recipe.batch_size, recipe.data.crop, recipe.data.scales) == (16, (512, 512), (0.5, 2.0))
        optimizer = recipe.optimizer
        assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.power) == ("sgd", 0.01, 0.9, 0.9)
        assert optimizer.weight_decay == 0.0005
        assert recipe.model.output_stride == (32 if recipe.model.head == "upernet" else 8)
        assert (recipe.model.aux, recipe.model.aux_stage, recipe.loss.aux_weight) == (True, 3, 0.4)
        assert (recipe.loss.branch_weight, recipe.loss.presence_weight) == (1.0, 0.2)
    regions = [load_recipe(name) for name in ROWS if name.startswith(f"{dataset}/ocr_")]
    assert [(recipe.model.aux, recipe.loss.branch_weight) for recipe in regions] == [(False, 0.4)] * 2


def test_rows_of_the_result_figure_are_those_of_the_tables_by_name() -> None:
    """So that the cells of the tables are reused in one directory."""
    figure = {row.name: row for row in TABLES["result_figure"].rows}
    assert [name for name in figure if "coco" not in name] == [
        f"{head}_s{stride}" for stride in (16, 8) for head in ("fcn", "danet_aux", "caa")
    ]
    same = [name for table in ("table4", "state_of_the_art") for name in ROWS if name.startswith(f"{table}/")]
    shared = [name for name in same if name.partition("/")[2] in figure]
    assert len(shared) == 5
    for name in shared:
        assert load_recipe(name) == load_recipe(f"result_figure/{name.partition('/')[2]}")


def test_rows_that_the_paper_leaves_open_have_a_note() -> None:
    noted = {
        f"{name}/{row.name}": row.note
        for name, table in TABLES.items()
        for row in table.rows
        if row.note and name != "heads"
    }
    for row in ("caa_convnext_large", "caa_car_convnext_large", "caa_dinov2_base"):
        assert "Neither a number nor settings" in noted.pop(f"ade20k/{row}_160k")
    assert "trained at stride 8 or 16" in noted.pop("table5/caa_efficientnet_b7_s8")
    assert "does not state the schedule" in noted["appendix/caa_efficientnet_b5_coco_stuff_164k"]
    assert list(noted) == [f"appendix/{row.name}" for row in TABLES["appendix"].rows]
    assert all("auxiliary loss; ours does not" in note for note in noted.values())


@pytest.mark.parametrize("dataset", BASES)
def test_a_base_is_a_recipe_of_its_dataset(dataset: str) -> None:
    assert load_recipe(BASES[dataset]).data.dataset == dataset


FOR_ANY_DATASET = [name for name, table in TABLES.items() if table.recipe is None]


@pytest.mark.parametrize("name", FOR_ANY_DATASET)
def test_a_row_on_another_dataset_changes_only_the_values_that_the_table_studies(name: str, tmp_path: Path) -> None:
    grid = plan_grid(name, tmp_path, dataset="scenes")
    base = load_recipe("scenes/caa_resnet18")
    for row in grid.rows:
        recipe = grid.by_row[row.name, 0].recipe
        assert set(base.differences(recipe)) <= {
            *(f"model.{key}" for key in row.model),
            *(option[2:].partition("=")[0] for option in row.options),
        }


LARGE_BACKBONES = ("table5", "appendix")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE_BACKBONES else ()) for name in FOR_ANY_DATASET]
)
def test_every_row_builds_its_model_on_another_dataset(name: str, tmp_path: Path) -> None:
    for cell in plan_grid(name, tmp_path, dataset="scenes").cells:
        config = {key: value for key, value in vars(cell.recipe.model).items() if key in Architecture.model_fields}
        with torch.device("meta"):
            model = Segmenter(ModelConfig(**config, num_classes=8))
        assert model.config.head == cell.recipe.model.head


def test_each_idea_changes_only_its_own_settings_of_the_recipe(tmp_path: Path) -> None:
    grid = plan_grid("camvid_ideas", tmp_path, seeds=2)
    base, short = load_recipe("camvid/caa_resnet18_long"), load_recipe("camvid/caa_resnet18")
    assert grid.by_row["base", 0].recipe == base
    assert len(grid.cells) == 2 * len(grid.rows)  # no two rows have the same recipe
    for row in grid.rows[1:]:
        options = [option[2:].partition("=")[0] for option in row.options]
        changed = set(base.differences(grid.by_row[row.name, 0].recipe))
        assert changed
        assert changed <= {*(f"model.{key}" for key in row.model), *options}
    colors = grid.by_row["color_changes", 0].recipe.data
    assert short.data.replace(cache="device") == colors


OWN_LOSSES = {"danet": "danet_branches", "ocr": "ocr_branches", "encnet": "encnet_presence"}


def test_the_table_of_heads_has_every_head() -> None:
    assert [row.name for row in TABLES["heads"].rows] == [*HEAD_NAMES, "caa_car", *OWN_LOSSES.values()]


def test_all_heads_have_the_same_supervision_and_additional_losses_have_separate_rows(tmp_path: Path) -> None:
    """A head has additional supervision if an output other than its prediction gives the backbone a gradient."""
    grid = plan_grid("heads", tmp_path, dataset="scenes", overrides=["--model.channels=16", "--model.key_channels=8"])
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for row in grid.rows:
        recipe = grid.by_row[row.name, 0].recipe
        if recipe.model.car:
            assert (row.name, row.baseline) == ("caa_car", "caa")
            continue
        config = {key: value for key, value in vars(recipe.model).items() if key in Architecture.model_fields}
        model = Segmenter(ModelConfig(**config, num_classes=3))
        prediction = model.coarse(images)
        losses = [recipe.loss.branch_weight * logits.square().sum() for logits in prediction.branches.values()]
        if prediction.presence is not None:
            losses.append(recipe.loss.presence_weight * prediction.presence.square().sum())
        weights = list(model.backbone.parameters())
        gradients = [
            gradient
            for loss in losses
            if loss.requires_grad
            for gradient in torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        ]
        further = any(gradient is not None and bool(gradient.any()) for gradient in gradients)
        assert further == (row.name in OWN_LOSSES.values()), row.name
