"""Report of a grid of runs."""

import json
from pathlib import Path

import pytest
from scipy import stats

from caaseg.analysis.paired import paired_difference
from caaseg.cli import main
from caaseg.reproduce.grid import Grid, plan_grid, stored_seeds
from caaseg.reproduce.report import Cost, GridReport, ReportRow, grid_report
from caaseg.reproduce.report_figures import draw_classes, draw_grid
from caaseg.reproduce.report_text import as_json, grid_table, markdown, shown_lines
from caaseg.reproduce.runner import finished_grid
from caaseg.reproduce.tables import TABLES


def report_row(
    row: str, *scores: float | None, baseline: ReportRow | None = None, note: str | None = None
) -> ReportRow:
    pairs = [] if baseline is None else [(a, b) for a, b in zip(scores, baseline.scores, strict=True) if a and b]
    return ReportRow(
        row=row,
        label=f"the {row}",
        protocol="single scale",
        scores=scores,
        paper=50.0,
        paper_std=None,
        baseline=None if baseline is None else baseline.row,
        difference=paired_difference([a for a, _ in pairs], [b for _, b in pairs]),
        cost=Cost(images_per_second=123.4, peak_gpu_bytes=5_000_000_000, hardware=("a GPU",)),
        relative_time=None,
        parameters=None,
        note=note,
    )


def test_the_report_shows_scores_differences_and_claims() -> None:
    first = report_row("axial", 0.50, 0.60, 0.70)
    rows = (
        first,
        report_row("better", 0.51, 0.61, 0.711, baseline=first),
        report_row("worse", 0.49, 0.59, 0.689, baseline=first),
        report_row("unclear", 0.55, 0.58, 0.75, baseline=first),
        report_row("unfinished", 0.55, None, None, baseline=first),
        report_row("none", None, None, None, baseline=first, note="The paper does not state the stride."),
    )
    quoted = (("Other", 61.5, "quoted by the paper"),)
    report = GridReport(title="A table", notes=("A note.",), rows=rows, quoted=quoted, same_data=True, missing=5)
    page = markdown(report)
    cells = {
        arguments[1].strip(): [word.strip() for word in arguments[2:-1]]
        for arguments in (text.split("|") for text in page.splitlines())
        if len(arguments) > 2
    }
    assert cells["the axial"] == ["60.00 ± 10.00 (n 3)", "50.00", "", "", "", "123", "5.00"]
    assert cells["the better"][2:5] == ["to axial: +1.03", "[+0.89, +1.18]", "higher"]
    assert cells["the worse"][2:5] == ["to axial: -1.03", "[-1.18, -0.89]", "lower"]
    assert cells["the unclear"][4] == "no difference shown"
    assert cells["the unfinished"][:5] == [
        "55.00 (n 1 of 3)",
        "50.00",
        "to axial: +5.00",
        "no interval",
        "no difference shown",
    ]
    assert cells["the none [1]"][:5] == ["not finished", "50.00", "to axial:", "not finished", ""]
    assert cells["Other (quoted by the paper, not run here)"][:2] == ["", "61.50"]
    assert "- 5 cells are not finished; run the same command to resume." in page
    assert "- [1] The paper does not state the stride.\n" in page
    assert (
        "- Single scale. Shown: better is higher than axial (+1.03 points, interval [+0.89, +1.18], 3 seeds); worse is "
        "lower than axial (-1.03 points, interval [-1.18, -0.89], 3 seeds).\n"
    ) in page
    assert "- Single scale. No difference shown: unclear against axial (+2.67 points, interval [" in page
    assert (
        "- Single scale. Not compared: unfinished against axial (1 seed, no interval); none against axial (0 seeds, no "
        "interval).\n"
    ) in page
    assert "Intervals of mean IoU are corrected for 3 comparisons" in page
    assert [found["difference"] and found["difference"]["shown"] for found in as_json(report)["lines"]] == [
        None,
        "higher",
        "lower",
        "no difference shown",
        "no difference shown",
        None,
    ]
    assert as_json(report)["lines"][0]["cost"]["images_per_second"] == 123.4  # on a GPU
    assert grid_table(report).row_count == 7
    ours, paper = draw_grid(report).axes
    assert len(ours.containers) == 5  # the unfinished row has no marker
    assert len(paper.containers) == 6


def test_speeds_come_from_cells_that_were_alone() -> None:
    record = {"images_per_second": 10.0, "peak_gpu_bytes": 5, "hardware": {"device": "one"}}
    cost = Cost.of([{**record, "alone": True}, {**record, "alone": False, "images_per_second": 4.0}, None])
    assert cost is not None
    assert cost.images_per_second == 10
    cost = Cost.of([{**record, "alone": False}])
    assert cost is not None
    assert cost.images_per_second is None
    assert Cost.of([None]) is None


def test_the_training_time_of_a_row_is_relative_to_its_baseline(tmp_path: Path) -> None:
    grid = plan_grid("heads", tmp_path, dataset="scenes", rows=["axial", "caa"])
    write_cells(grid, {key: [0.1, 0.2, 0.3] for key in grid.by_row})
    for row, speed in (("axial", 30.0), ("caa", 20.0)):
        path = tmp_path / "cells" / f"{row}-seed0.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "images_per_second": speed}))
    assert [row.relative_time for row in grid_report(grid).rows] == [None, 1.5]


def test_a_row_has_the_backbone_of_the_paper_in_its_label_only_with_its_own_recipe() -> None:
    row = next(row for row in TABLES["car"].rows if row.name == "caa_aux_car")
    assert row.title(own_recipe=True) == "CAA, CAR, auxiliary loss, ConvNeXt-L + JPU, Adam"
    assert row.title(own_recipe=False) == "CAA, CAR, auxiliary loss"
    assert TABLES["heads"].rows[0].title(own_recipe=False) == "FCN"


def write_cells(grid: Grid, scores: dict[tuple[str, int], list[float | None]]) -> None:
    """Write cells with the IoU of classes a, b and c; the row caa has them in reverse order."""
    for (row, seed), values in scores.items():
        cell = grid.by_row[row, seed]
        names = dict(zip("abc", values, strict=True))
        iou = dict(reversed(names.items())) if row == "caa" else names
        known = [value for value in values if value is not None]
        score = {"split": "val", "scales": [1.0], "flip": False, "mean_iou": sum(known) / len(known), "iou": iou}
        record = {"recipe": cell.recipe.as_dict(), "parameters": 1, "peak_gpu_bytes": None, "images_per_second": None}
        grid.file(cell).parent.mkdir(parents=True, exist_ok=True)
        grid.file(cell).write_text(json.dumps({**record, "hardware": {"device": "a CPU"}, "scores": [score]}))


def test_rows_are_paired_by_common_seeds_and_classes_by_name(tmp_path: Path) -> None:
    grid = plan_grid("heads", tmp_path, dataset="scenes", seeds=5)
    axial: dict[int, list[float | None]] = {seed: [0.1 + 0.01 * seed, 0.5, 0.9] for seed in range(5)}
    caa: dict[int, list[float | None]] = {1: [0.2111, 0.5, 0.7], 2: [0.2212, 0.51, None], 4: [0.2413, 0.49, 0.72]}
    fcn: dict[int, list[float | None]] = {0: [0.1, 0.2, 0.3]}
    write_cells(
        grid, {(r, s): v for r, found in (("axial", axial), ("caa", caa), ("fcn", fcn)) for s, v in found.items()}
    )
    assert stored_seeds(tmp_path) == 5
    report = grid_report(finished_grid(grid))
    rows = {row.row: row for row in report.rows}
    assert list(rows) == ["fcn", "axial", "caa"]
    assert {name: row.seeds for name, row in rows.items()} == {"fcn": (0,), "axial": (0, 1, 2, 3, 4), "caa": (1, 2, 4)}
    assert (report.comparisons, report.class_comparisons, report.missing) == (1, 3, 0)
    common = [rows["axial"].scores[seed] for seed in (1, 2, 4)]
    interval = stats.ttest_rel(rows["caa"].finished, common).confidence_interval()
    difference = rows["caa"].difference
    assert difference is not None
    assert (difference.low, difference.high, difference.pairs) == pytest.approx((interval.low, interval.high, 3))
    classes = rows["caa"].classes
    assert {name: found.pairs for name, found in classes.items()} == {"a": 3, "b": 3, "c": 2}
    for name, ours, theirs in (("a", [0.2111, 0.2212, 0.2413], [0.11, 0.12, 0.14]), ("c", [0.7, 0.72], [0.9, 0.9])):
        expected = stats.ttest_rel(ours, theirs).confidence_interval(1 - 0.05 / 3)
        assert (classes[name].low, classes[name].high) == pytest.approx((expected.low, expected.high))
    assert [found.claim for found in (classes["a"], classes["b"])] == ["higher", "no difference shown"]
    assert "caa is higher than axial for class a (single scale)" in "\n".join(shown_lines(report))
    page = markdown(report)
    [line] = [line for line in page.splitlines() if line.startswith("| caa to axial |")]
    header = next(line for line in page.splitlines() if line.startswith("| row |") and "ours" not in line)
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert cells["a"].startswith("**+10.12 [")
    assert as_json(report)["lines"][2]["classes"]["a"]["shown"] == "higher"
    panels = [panel for panel in draw_classes(report).axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == [
        "FCN\nagainst axial",
        "channelized axial attention\nagainst axial",
    ]


def test_a_row_that_shares_the_runs_of_its_baseline_is_not_compared(tmp_path: Path) -> None:
    grid = plan_grid("camvid_ideas", tmp_path, rows=["base", "no_scaling", "car"], seeds=2, overrides=["--epochs=4"])
    same = plan_grid("camvid_ideas", tmp_path, rows=["base", "no_scaling"], seeds=2, overrides=["--data.scales=1 1"])
    for planned in (grid, same):
        write_cells(planned, {key: [0.1, 0.2, 0.3 + key[1] / 10] for key in planned.by_row})
    assert (grid_report(grid).comparisons, grid_report(grid).class_comparisons) == (2, 6)
    assert "4 epochs with batch size 16, starting from random weights." in grid_report(grid).notes[0]
    report = grid_report(same)
    assert "These rows are the same network here" in "\n".join(report.notes)
    assert (report.rows[1].difference, report.rows[1].classes, report.comparisons) == (None, {}, 0)
    assert [row.shares_runs for row in report.rows] == [False, True]
    assert "to base: | same runs |" in " ".join(markdown(report).split())
    assert "Not compared: no_scaling and base are the same runs." in "\n".join(shown_lines(report))


def test_cells_without_the_scores_of_a_protocol_are_not_finished(tmp_path: Path) -> None:
    single = plan_grid("heads", tmp_path, dataset="scenes", rows=["axial", "caa"], split="val")
    write_cells(single, {key: [0.1, 0.2, 0.3] for key in single.by_row})
    assert grid_report(single).missing == 0
    multi = plan_grid("heads", tmp_path, dataset="scenes", rows=["axial", "caa"], split="val", multi_scale=True)
    assert grid_report(multi).missing == 2


def test_a_report_without_training_needs_finished_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "reproduce",
        "heads",
        "--dataset",
        "scenes",
        "--report-only",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main(arguments) == 2
    assert "has no finished cell of this table; leave out --report-only" in capsys.readouterr().err
    grid = plan_grid("heads", tmp_path, dataset="scenes", seeds=2)
    write_cells(grid, {(row, seed): [0.1, 0.2, 0.3 + seed / 10] for row in ("axial", "caa") for seed in (0, 1)})
    assert main(arguments) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cells", "heads.md", "heads.json", "heads.png", "heads-classes.png")
    }
    assert "caa against axial (+0.00 points" in capsys.readouterr().out
