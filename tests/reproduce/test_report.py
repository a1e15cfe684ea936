"""Report of a grid of runs."""

from caaseg.analysis.paired import paired_difference
from caaseg.reproduce.report import Cost, GridReport, ReportRow, as_json, draw_grid, grid_table, markdown
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
    assert "- Shown: better is higher than axial (3 of 3 seeds); worse is lower than axial (3 of 3 seeds).\n" in page
    assert (
        "- Not shown: unclear against axial (3 of 3 seeds, interval contains zero); unfinished against axial (1 of 3 "
        "seeds, no interval); none against axial (0 of 3 seeds).\n"
    ) in page
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


def test_a_row_has_the_backbone_of_the_paper_in_its_label_only_with_its_own_recipe() -> None:
    row = next(row for row in TABLES["car"].rows if row.name == "caa_aux_car")
    assert row.title(own_recipe=True) == "CAA, CAR, auxiliary loss, ConvNeXt-L + JPU, Adam"
    assert row.title(own_recipe=False) == "CAA, CAR, auxiliary loss"
    assert TABLES["heads"].rows[0].title(own_recipe=False) == "FCN"
