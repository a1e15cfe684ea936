"""Draws attention.png, growth.png and the figures of the comparisons of heads from benchmarks/results.

Usage: python docs/figures/benchmarks.py [DIR]
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from caaseg.benchmarks.attention import Case, Measurement
from caaseg.benchmarks.model import ModelCost
from caaseg.reports.figures import draw_groups, draw_growth, save
from caaseg.reproduce.grid import plan_grid, stored_seeds
from caaseg.reproduce.report import GridReport, grid_report
from caaseg.reproduce.report_figures import draw_classes, draw_grid
from caaseg.reproduce.runner import finished_grid

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    """Return the content of a result file."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return content


def measurement(values: dict[str, Any]) -> Measurement:
    """Return a measurement from its values in JSON."""
    case = Case(**{field.name: values[field.name] for field in fields(Case)})
    others = [field.name for field in fields(Measurement) if field.name != "case"]
    return Measurement(case=case, **{name: values[name] for name in others if name in values})


def draw(directory: Path) -> None:
    """Draw all figures."""
    # The fused kernels were measured in a second run on the same GPU, in bfloat16.
    attention = [measurement(values) for values in read("attention.json")["measurements"]]
    fused = [measurement(values) for values in read("fused.json")["measurements"]]
    attention += [found for found in fused if found.case.implementation == "fused"]
    save(draw_groups(attention), directory / "attention.png")

    growth = read("growth.json")
    costs = [ModelCost(**{**values, "size": tuple(values["size"])}) for values in growth["models"]]
    save(draw_growth(costs, growth["setting"]["batch"]), directory / "growth.png")

    report = heads_report("heads", "camvid/caa_resnet34", multi_scale=True)
    save(draw_grid(report), directory / "camvid_heads.png")
    save(draw_classes(report), directory / "camvid_heads_classes.png")
    report = heads_report("scenes", "scenes/demo_caa", multi_scale=False)
    save(draw_classes(report), directory / "scenes_heads_classes.png")


def heads_report(name: str, recipe: str, *, multi_scale: bool) -> GridReport:
    """Return the report of the committed cells of a comparison of heads."""
    seeds = stored_seeds(RESULTS / name)
    grid = plan_grid("heads", RESULTS / name, recipe=recipe, seeds=seeds, split="test", multi_scale=multi_scale)
    return grid_report(finished_grid(grid))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
