"""Numbers of the documentation equal those of the committed results, rounded as they are written."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs._extensions.result_numbers import evaluate, is_rounded

from caaseg.analysis.paired import paired_difference

DOCS = Path(__file__).parents[1] / "docs"
SOURCES: dict[str, list[dict[str, Any]]] = yaml.safe_load((DOCS / "table_numbers.yaml").read_text())
PROSE: dict[str, list[dict[str, Any]]] = yaml.safe_load((DOCS / "prose_numbers.yaml").read_text())
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
HEADS = {
    "FCN": "fcn",
    "squeeze-and-excitation, then axial": "axial_se",
    "channelized axial attention": "caa",
    "self-attention": "self_attention",
    "channelized self-attention": "channelized_self_attention",
    "DANet": "danet",
}


def tables(page: str) -> list[tuple[str, list[list[str]]]]:
    """Return heading and rows of cells, without the header, of each table of a page that holds numbers."""
    found, heading, rows = [], "", list[list[str]]()
    for line in [*(DOCS / page).read_text().splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            rows.append([cell.strip().strip("*") for cell in line.strip("|").split("|")])
        elif rows:
            found.append((heading, rows[2:]))
            rows = []
    return found


@pytest.mark.parametrize("page", SOURCES)
def test_every_table_has_its_sources(page: str) -> None:
    assert [heading for heading, _ in tables(page)] == [source["heading"] for source in SOURCES[page]]


def checked_tables() -> list[Any]:
    return [
        pytest.param(rows, source, id=f"{page}-{heading}-{k}")
        for page in SOURCES
        for k, ((heading, rows), source) in enumerate(zip(tables(page), SOURCES[page], strict=True))
        if "unfiled" not in source
    ]


@pytest.mark.parametrize(("rows", "source"), checked_tables())
def test_numbers_of_a_table_are_those_of_the_results(rows: list[list[str]], source: dict[str, Any]) -> None:
    assert [row[0] for row in rows] == [row[0] for row in source["rows"]]
    for row, (_, *sources) in zip(rows, source["rows"], strict=True):
        if "columns" in source:
            sources = [sources[0] + column for column in source["columns"]]
        assert len(row) == len(sources) + 1, row
        for cell, expected in zip(row[1:], sources, strict=True):
            check_cell(cell, expected)


def check_cell(cell: str, expected: str | list[str] | None) -> None:
    """Check the numbers of a cell against an expression per number; None stands for a cell without numbers."""
    if expected in ("published", "unfiled", "paired", "seed"):
        return
    expressions = [] if expected is None else [expected] if isinstance(expected, str) else expected
    numbers = NUMBER.findall(cell)
    assert len(numbers) == len(expressions), cell
    for number, expression in zip(numbers, expressions, strict=True):
        value = evaluate(expression)
        assert is_rounded(number, value), f"{cell!r}: {expression} is {value}"


def test_differences_between_heads_are_those_of_the_cells() -> None:
    _, rows = tables("results.md")[0]
    for name, _, _, *differences in rows:
        if name == "axial":
            continue
        for cell, flip in zip(differences, (False, True), strict=True):
            scores, baseline = (
                [evaluate(f"heads/cells/{head}-seed{k}.json scores[flip={flip}].mean_iou * 100") for k in range(3)]
                for head in (HEADS[name], "axial")
            )
            difference = paired_difference(scores, baseline)
            assert difference is not None
            numbers = NUMBER.findall(cell)
            assert len(numbers) == 3
            for number, value in zip(numbers, difference[:3], strict=True):
                assert value is not None
                assert is_rounded(number, value), f"{name}: {cell}"


@pytest.mark.parametrize(
    ("page", "entry"), [pytest.param(page, entry, id=entry["text"][:40]) for page in PROSE for entry in PROSE[page]]
)
def test_numbers_of_a_sentence_are_those_of_the_results(page: str, entry: dict[str, Any]) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert text.count(entry["text"]) == 1
    for number, expression in zip(NUMBER.findall(entry["text"]), entry["sources"], strict=True):
        if expression is not None:
            value = evaluate(expression)
            assert is_rounded(number, value), f"{number}: {expression} is {value}"


def test_a_wrong_number_is_detected() -> None:
    check_cell("151", "model.json models[model=torchvision:fcn].training_images_per_second")
    with pytest.raises(AssertionError, match=r"'152': model.json .* is 151\.4"):
        check_cell("152", "model.json models[model=torchvision:fcn].training_images_per_second")
    with pytest.raises(ValueError, match="0 elements match"):
        check_cell("151", "model.json models[model=unknown].training_images_per_second")
    with pytest.raises(ValueError, match="no such file"):
        check_cell("151", "none.json x")
