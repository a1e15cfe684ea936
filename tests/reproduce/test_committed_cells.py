"""The cells committed under benchmarks/results are readable, so that finished cells are never trained again."""

from pathlib import Path

import pytest
from scipy import stats

from caaseg.config import Recipe
from caaseg.reproduce.grid import plan_grid, stored_seeds
from caaseg.reproduce.report import grid_report
from caaseg.reproduce.report_text import shown_lines
from caaseg.reproduce.runner import finished_grid, read_cell, score_of
from caaseg.training.checkpoints import MAY_CHANGE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELLS = sorted(RESULTS.glob("*/cells/*.json"))


def test_there_are_cells() -> None:
    assert {path.parts[-3] for path in CELLS} == {"car", "heads", "scenes", "table1"}


@pytest.mark.parametrize("path", CELLS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_committed_cell_has_a_valid_recipe_and_scores(path: Path) -> None:
    record = read_cell(path)
    assert record is not None
    recipe = Recipe.read(record["recipe"], f"{path}: ")
    assert recipe.seed == record["seed"]
    assert recipe.data.dataset == ("scenes" if "scenes" in path.parts else "camvid")
    assert all(0 < score["mean_iou"] < 1 for score in record["scores"])
    assert path.stem == f"{record['row']}-seed{record['seed']}"


def test_the_comparison_of_car_reuses_cells_of_equal_settings_and_lists_missing_comparisons() -> None:
    heads = ("fcn", "self_attention", "caa")
    grid = plan_grid(
        "car",
        RESULTS / "car",
        dataset="camvid",
        recipe="camvid/caa_resnet34",
        rows=[f"{head}{car}" for head in heads for car in ("", "_car")],
        seeds=3,
        split="test",
        multi_scale=True,
    )
    assert len(grid.cells) == 18
    missing = []
    for cell in grid.cells:
        record = read_cell(grid.file(cell))
        if record is None:
            missing.append(cell)
            continue
        assert set(Recipe.read(record["recipe"], "").differences(cell.recipe)) <= MAY_CHANGE
        assert all(score_of(record, protocol) is not None for protocol in cell.protocols)
    for head in heads:
        for seed in range(3):
            same = RESULTS / "heads" / "cells" / f"{head}-seed{seed}.json"
            assert grid.file(grid.by_row[head, seed]).read_bytes() == same.read_bytes()
    report = grid_report(grid)
    assert report.missing == len(missing)
    text = "\n".join(shown_lines(report))
    for head in heads:
        for protocol in report.protocols:
            [line] = [row for row in report.rows if (row.row, row.protocol) == (f"{head}_car", protocol)]
            finished = 3 - sum(cell.row == f"{head}_car" for cell in missing)
            assert len(line.finished) == finished
            assert finished or f"{head}_car against {head} (0 seeds, no interval)" in text


def test_heads_are_reported_without_training_and_no_difference_is_shown_after_correction() -> None:
    settings = {"dataset": "camvid", "recipe": "camvid/caa_resnet34", "split": "test", "multi_scale": True}
    grid = plan_grid("heads", RESULTS / "heads", seeds=stored_seeds(RESULTS / "heads"), **settings)  # type: ignore[arg-type]
    report = grid_report(finished_grid(grid))
    assert [row.row for row in report.rows[::2]] == [
        *("fcn", "axial", "axial_se", "caa", "self_attention", "channelized_self_attention", "danet_branches")
    ]
    assert (report.missing, report.comparisons, report.class_comparisons) == (0, 12, 132)
    for row in report.rows:
        cells = [
            read_cell(RESULTS / "heads" / "cells" / f"{name}-seed{k}.json")
            for name in (row.row, "axial")
            for k in range(3)
        ]
        for name, found in row.classes.items():
            flip = row.protocol != report.protocols[0]
            values = [score["iou"][name] for cell in cells if cell for score in cell["scores"] if score["flip"] == flip]
            test = stats.ttest_rel(values[:3], values[3:])
            interval = test.confidence_interval(1 - 0.05 / 132)
            assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
        assert row.difference is None or row.difference.claim == "no difference shown"
        assert len(row.classes) == (0 if row.row == "axial" else 11)
