"""What is said of a grid of runs."""

from typing import Any

from caaseg.analysis.paired import paired_difference
from caaseg.reports.grids import Cost, GridReport, Line, as_json, draw_grid, grid_table, markdown


def line(row: str, *scores: float | None, baseline: Line | None = None, **given: Any) -> Line:
    pairs = [] if baseline is None else [(a, b) for a, b in zip(scores, baseline.scores, strict=True) if a and b]
    return Line(
        row=row,
        label=f"the {row}",
        manner="single scale",
        scores=scores,
        paper=50.0,
        paper_deviation=None,
        baseline=None if baseline is None else baseline.row,
        difference=paired_difference([a for a, _ in pairs], [b for _, b in pairs]),
        cost=Cost(images_per_second=123.4, peak_gpu_bytes=5_000_000_000, hardware=("a GPU",)),
        relative_time=None,
        parameters=None,
        **given,
    )


def test_the_report_says_what_was_measured_and_no_more() -> None:
    first = line("axial", 0.50, 0.60, 0.70)
    lines = (
        first,
        line("better", 0.51, 0.61, 0.711, baseline=first),
        line("worse", 0.49, 0.59, 0.689, baseline=first),
        line("unclear", 0.55, 0.58, 0.75, baseline=first),
        line("begun", 0.55, None, None, baseline=first),
        line("none", None, None, None, baseline=first),
    )
    report = GridReport(
        title="A table", notes=("A note.",), lines=lines, quoted=(("Other", 61.5),), same_data=True, missing=5
    )
    page = markdown(report)
    rows = {
        words[1].strip(): [word.strip() for word in words[2:-1]]
        for words in (text.split("|") for text in page.splitlines())
        if len(words) > 2
    }
    assert rows["the axial"] == ["60.00 ± 10.00 (n 3)", "50.00", "", "", "", "123", "5.00"]
    assert rows["the better"][2:5] == ["to axial: +1.03", "[+0.89, +1.18]", "higher"]
    assert rows["the worse"][2:5] == ["to axial: -1.03", "[-1.18, -0.89]", "lower"]
    assert rows["the unclear"][4] == "no difference shown"
    assert rows["the begun"][:5] == [
        "55.00 (n 1 of 3)",
        "50.00",
        "to axial: +5.00",
        "no interval",
        "no difference shown",
    ]
    assert rows["the none"][:5] == ["not run yet", "50.00", "to axial:", "not run yet", ""]
    assert rows["Other (quoted by the paper, not run here)"][:2] == ["", "61.50"]
    assert "- 5 cells were not run yet; the same command goes on." in page
    assert [found["difference"] and found["difference"]["shown"] for found in as_json(report)["lines"]] == [
        None,
        "higher",
        "lower",
        "no difference shown",
        "no difference shown",
        None,
    ]
    assert as_json(report)["lines"][0]["cost"]["images_per_second"] == 123.4  # of a GPU
    assert grid_table(report).row_count == 7
    ours, paper = draw_grid(report).axes
    assert len(ours.containers) == 5  # the row that was not run has no mark
    assert len(paper.containers) == 6
