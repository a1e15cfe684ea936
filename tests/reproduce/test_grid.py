"""The runs of a table, and the messages for grids that cannot be run."""

import shutil
from pathlib import Path

import pytest

from caaseg.cli import main
from caaseg.errors import CaasegError
from caaseg.reproduce.grid import plan_grid
from tests.models import mean_head


def test_rows_differ_only_in_the_values_that_the_table_studies(tmp_path: Path) -> None:
    assert plan_grid("table2", tmp_path).seeds == 5
    assert plan_grid("table2", tmp_path, dataset="scenes").seeds == 1
    own = plan_grid("table4", tmp_path, seeds=2)
    assert [cell.name for cell in own.cells[6:9]] == ["caa_aux_s8-seed0", "danet_aux_s8-seed1", "axial_s16-seed1"]
    assert own.by_row["caa_s8", 1].recipe.model.pretrained is True
    assert len(own.by_row["caa_s8", 1].protocols) == 2

    other = plan_grid("table4", tmp_path, dataset="camvid", overrides=["--model.backbone", "resnet34"], split="test")
    recipe = other.by_row["caa_aux_s16", 0].recipe
    assert (recipe.model.head, recipe.model.aux, recipe.model.output_stride) == ("caa", True, 16)
    assert (recipe.model.backbone, recipe.model.pretrained, recipe.data.crop) == ("resnet34", False, (352, 480))
    assert {protocol.split for protocol in other.cells[0].protocols} == {"test"}

    # Rows that the override makes the same network are trained once.
    same = plan_grid("table5", tmp_path, dataset="scenes", overrides=["--model.backbone", "resnet18"])
    assert len(same.rows) == 7
    assert [cell.row for cell in same.cells] == ["axial_resnet50_s16", "caa_resnet50_s16", "caa_efficientnet_b7_s8"]
    filtered = plan_grid("state_of_the_art", tmp_path, dataset="cityscapes")
    assert [row.name for row in filtered.rows] == ["danet_aux_s8_cityscapes", "caa_aux_s8_cityscapes"]
    assert filtered.recipe is None


def test_a_head_of_your_own_is_a_row_of_the_table_of_heads(tmp_path: Path) -> None:
    own = f"{Path(mean_head.__file__)}:MeanHead"
    grid = plan_grid("heads", tmp_path, dataset="scenes", rows=["axial", own])
    assert [row.name for row in grid.rows] == ["axial", "MeanHead"]
    assert grid.rows[1].baseline == "axial"
    assert grid.rows[1].title(own_recipe=False) == mean_head.MeanHead.title
    assert grid.by_row["MeanHead", 0].recipe.model.head == own

    copied = shutil.copy(mean_head.__file__, tmp_path)
    with pytest.raises(CaasegError, match=r"but another row is named MeanHead; rename the class"):
        plan_grid("heads", tmp_path, dataset="scenes", rows=[own, f"{copied}:MeanHead"])
    with pytest.raises(CaasegError, match=r"--rows has '.*:MeanHead'; expected any of axial, axial_se, caa"):
        plan_grid("table2", tmp_path, dataset="scenes", rows=[own])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heads"], "heads is not a table of the paper and has no dataset; give --dataset or --recipe"),
        (["table2", "--dataset", "nowhere"], "no dataset is called 'nowhere'; expected any of"),
        (
            ["table2", "--dataset", "pascal_context_60"],
            "no recipe is shipped for pascal_context_60; give one with --recipe",
        ),
        (["table2", "--dataset", "camvid", "--recipe", "scenes/caa_resnet18"], "but recipe scenes/caa_resnet18 is for"),
        (
            ["camvid_ideas", "--dataset", "scenes"],
            "but recipe camvid/caa_resnet18_long is for camvid",
        ),
        (["table2", "--rows", "ca"], "--rows has 'ca'; expected any of axial, axial_se, caa"),
        (["table2", "--seeds", "0"], "--seeds is 0; expected greater than or equal to 1"),
        (["table2", "--seed", "3"], "--seed is set by the grid; expected --seeds N"),
        (["table2", "--data.dataset=camvid"], "--data.dataset is set by the grid; expected --dataset"),
        (["table2", "--keep-run", "false"], "unknown option --keep-run; did you mean --keep-runs?"),
        (["table2", "--model.heed", "caa"], "unknown option --model.heed; did you mean --model.head?"),
        (["groups", "--dataset", "scenes"], "--dataset is given, but groups trains nothing and reads no data"),
        (["groups", "--report-only"], "--report-only is given, but groups trains nothing and reads no data"),
        (["groups", "--steps", "3"], "--steps is given, but groups trains nothing with a recipe; leave it out"),
        (["table2", "--dataset", "camvid"], "data.root is missing: camvid needs the directory of its files"),
    ],
)
def test_a_grid_that_cannot_run_gives_one_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "grid"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("caaseg: ")
    assert not (tmp_path / "grid").exists()
