"""Draws attention.png, growth.png and camvid_heads.png from benchmarks/results.

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
from caaseg.reproduce.grid import plan_grid
from caaseg.reproduce.report import draw_grid, grid_report

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
    """Draw all three figures."""
    # The fused kernels were measured in a second run on the same GPU, in bfloat16.
    attention = [measurement(values) for values in read("attention.json")["measurements"]]
    fused = [measurement(values) for values in read("fused.json")["measurements"]]
    attention += [found for found in fused if found.case.implementation == "fused"]
    save(draw_groups(attention), directory / "attention.png")

    growth = read("growth.json")
    costs = [ModelCost(**{**values, "size": tuple(values["size"])}) for values in growth["models"]]
    save(draw_growth(costs, growth["setting"]["batch"]), directory / "growth.png")

    rows = sorted({path.stem.partition("-")[0] for path in (RESULTS / "heads" / "cells").glob("*.json")})
    grid = plan_grid(
        "heads",
        RESULTS / "heads",
        dataset="camvid",
        recipe="camvid/caa_resnet34",
        rows=rows,
        seeds=3,
        split="test",
        multi_scale=True,
    )
    save(draw_grid(grid_report(grid)), directory / "camvid_heads.png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
