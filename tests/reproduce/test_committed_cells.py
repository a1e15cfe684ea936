"""The cells committed under benchmarks/results are readable, so that finished cells are never trained again."""

import json
from pathlib import Path

import pytest

from caaseg.config import Recipe
from caaseg.reproduce.runner import read_cell

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELLS = sorted(RESULTS.glob("*/cells/*.json"))


def test_there_are_cells() -> None:
    assert {path.parts[-3] for path in CELLS} == {"heads", "table1"}


@pytest.mark.parametrize("path", CELLS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_committed_cell_has_a_recipe_of_today_and_scores(path: Path) -> None:
    record = read_cell(path)
    assert record is not None
    recipe = Recipe.read(record["recipe"], f"{path}: ")
    assert recipe.seed == record["seed"]
    assert recipe.data.dataset == "camvid"
    assert all(0 < score["mean_iou"] < 1 for score in record["scores"])
    assert json.loads(path.read_text())["row"] in path.stem
