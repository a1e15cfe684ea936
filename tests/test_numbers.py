"""Numbers of the documentation equal those of the committed results, rounded as they are written."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs._extensions.result_numbers import evaluate, is_rounded

from caaseg.analysis.paired import paired_difference
from tests.page_numbers import NUMBER, check_every_number, check_numbers, prose

DOCS = Path(__file__).parents[1] / "docs"
SOURCES: dict[str, list[dict[str, Any]]] = yaml.safe_load((DOCS / "table_numbers.yaml").read_text())
PROSE: dict[str, dict[str, Any]] = yaml.safe_load((DOCS / "prose_numbers.yaml").read_text())
EXPLANATION = [f"explanation/{page.name}" for page in sorted((DOCS / "explanation").glob("*.md"))]
PAGES = ["speed.md", "results.md", "planning.md", *EXPLANATION]
ROLES = [role for page in DOCS.rglob("*.md") for role in re.findall(r"\{number\}`([^`]*)`", page.read_text())]
HEADS = {
    "FCN": "fcn",
    "axial": "axial",
    "squeeze-and-excitation, then axial": "axial_se",
    "channelized axial attention": "caa",
    "channelized axial attention, CAR": "caa_car",
    "FCN, CAR": "fcn_car",
    "self-attention": "self_attention",
    "self-attention, CAR": "self_attention_car",
    "channelized self-attention": "channelized_self_attention",
    "DANet": "danet",
    "DANet with its branch losses": "danet_branches",
}


def tables(page: str) -> list[tuple[str, list[list[str]]]]:
    """Return heading and rows of cells, without the header, of each table of a page."""
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


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_its_sources(page: str) -> None:
    assert [heading for heading, _ in tables(page)] == [source["heading"] for source in SOURCES.get(page, [])]


def checked_tables() -> list[Any]:
    return [
        pytest.param(rows, source, id=f"{page}-{heading}-{k}")
        for page in SOURCES
        for k, ((heading, rows), source) in enumerate(zip(tables(page), SOURCES[page], strict=True))
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


def check_cell(cell: str, expected: str | list[str] | dict[str, str] | None) -> None:
    """Check the numbers of a cell against an expression per number.

    None stands for a cell without numbers, and a mapping of the cell to a reason for one that is not measured.
    """
    if expected == "paired":  # checked below
        return
    if isinstance(expected, dict):
        assert list(expected) == [cell]
    else:
        check_numbers(cell, [expected] if isinstance(expected, str) else list(expected or []))


@pytest.mark.parametrize(
    ("heading", "directory", "seeds", "flips"),
    [
        ("All heads under one recipe", "heads", 3, (False, True)),
        ("Heads on synthetic scenes", "scenes", 5, (False,)),
        ("Class-aware regularization", "car", 3, (False, True)),
    ],
)
def test_differences_between_heads_are_those_of_the_cells(
    heading: str, directory: str, seeds: int, flips: tuple[bool, ...]
) -> None:
    rows = next(rows for found, rows in tables("results.md") if found == heading)
    compared = [row for row in rows if row[-1]]
    for name, *cells in compared:
        for cell, flip in zip(cells[-len(flips) :], flips, strict=True):
            scores, baseline = (
                [
                    evaluate(f"{directory}/cells/{head}-seed{k}.json scores[flip={flip}].mean_iou * 100")
                    for k in range(seeds)
                ]
                for head in (HEADS[name], HEADS[name.removesuffix(", CAR")] if name.endswith("CAR") else "axial")
            )
            difference = paired_difference(scores, baseline, comparisons=len(flips) * len(compared))
            assert difference is not None
            numbers = NUMBER.findall(cell)
            assert len(numbers) == 3
            for number, value in zip(numbers, difference[:3], strict=True):
                assert value is not None
                assert is_rounded(number, value), f"{name}: {cell}"


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_the_text_has_its_source(page: str) -> None:
    without_cells = re.sub(r"^\|[-:|]+\n(?:\|.*\n)*", "", (DOCS / page).read_text(), flags=re.MULTILINE)
    check_every_number(prose(without_cells), PROSE.get(page, {}))


def test_every_source_is_that_of_a_checked_page() -> None:
    assert {*SOURCES, *PROSE} <= set(PAGES)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_a_value(role: str) -> None:
    expression, _, form = role.partition(";")
    assert format(evaluate(expression), form.strip())


def test_a_wrong_number_is_detected() -> None:
    check_cell("151", "model.json models[model=torchvision:fcn].training_images_per_second")
    with pytest.raises(AssertionError, match=r"'152': model.json .* is 151\.4"):
        check_cell("152", "model.json models[model=torchvision:fcn].training_images_per_second")
    with pytest.raises(ValueError, match="0 elements match"):
        check_cell("151", "model.json models[model=unknown].training_images_per_second")
    with pytest.raises(ValueError, match="no such file"):
        check_cell("151", "none.json x")


def test_a_number_without_a_source_is_detected() -> None:
    text = prose("Of 233 images in `2` files, 171 are [new](a/5.md) with ResNet-34.")
    measured = {"text": "171 are", "sources": ["headline/train-seed0.on-Seq05VD.json images"]}
    check_every_number(text, {"measured": [measured], "not_measured": {"233 images": "size of the split"}})
    with pytest.raises(AssertionError, match=r"numbers without a source: \['Of 233 images in files"):
        check_every_number(text, {"measured": [measured]})
    with pytest.raises(AssertionError, match="'234 images' is not in the page any more"):
        check_every_number(text, {"not_measured": {"234 images": "size of the split"}})
    with pytest.raises(AssertionError, match="occurs 0 times"):
        check_every_number(text, {"measured": [{"text": "172 are", "sources": []}]})
