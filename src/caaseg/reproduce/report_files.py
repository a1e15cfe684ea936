"""Files of the report of a grid: Markdown, JSON and figures."""

import json
from collections.abc import Mapping
from typing import Any

from caaseg.files import atomic_write
from caaseg.reports.figures import save
from caaseg.reproduce.grid import Grid
from caaseg.reproduce.report import GridReport, grid_report
from caaseg.reproduce.report_figures import draw_classes, draw_grid
from caaseg.reproduce.report_text import MAX_CLASSES, as_json, markdown


def write_grid_report(grid: Grid, origin: Mapping[str, Any]) -> GridReport:
    """Write the report into the directory of the grid as Markdown, JSON and PNG."""
    report = grid_report(grid)
    path = grid.directory / grid.name
    with atomic_write(path.with_suffix(".md")) as temporary:
        temporary.write_text(markdown(report), encoding="utf-8")
    with atomic_write(path.with_suffix(".json")) as temporary:
        temporary.write_text(
            json.dumps({**origin, "table": grid.name, **as_json(report)}, indent=1) + "\n", encoding="utf-8"
        )
    save(draw_grid(report), path.with_suffix(".png"))
    if 0 < len(report.class_names) <= MAX_CLASSES:
        save(draw_classes(report), path.with_name(f"{grid.name}-classes.png"))
    return report
