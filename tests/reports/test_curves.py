"""Curves take their colors from the page and stay small."""

import xml.etree.ElementTree as ET

from caaseg.reports.curves import Line, as_svg, draw_lines


def test_a_figure_is_well_formed_svg_with_the_colors_of_the_page_and_unique_ids() -> None:
    lines = [Line("CAA", [1, 2, 3], [0.1, 0.5, 0.7]), Line("FCN", [1, 2, 3], [0.1, 0.2, 0.2])]
    first, second = (as_svg(draw_lines(lines), name) for name in ("first", "second"))
    root = ET.fromstring(first)
    assert root.attrib == {"role": "img", "aria-label": "first", "viewBox": root.attrib["viewBox"]}
    for variable in ("var(--line-1)", "var(--line-2)", "var(--ink)", "var(--rule)"):
        assert variable in first
    assert "#0b6e99" not in first
    assert {"CAA", "FCN", "step"} <= {text.text for text in root.iter() if text.tag.endswith("text")}
    ids = [{part.attrib["id"] for part in ET.fromstring(svg).iter() if "id" in part.attrib} for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = {value.removeprefix("#") for part in root.iter() for key, value in part.attrib.items() if key == "href"}
    assert used <= ids[0]


def test_figures_are_reproducible_and_long_lines_stay_small() -> None:
    steps = list(range(10, 80_001, 10))
    line = Line("loss", steps, [1 / step for step in steps])
    assert as_svg(draw_lines([line]), "loss") == as_svg(draw_lines([line]), "loss")
    assert len(as_svg(draw_lines([line]), "loss")) < 30_000


def test_a_line_without_points_is_drawn() -> None:
    assert "<svg" in as_svg(draw_lines([Line("loss", [], [])]), "loss")
