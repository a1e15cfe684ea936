"""The report of a training run: its curves, its scores class by class, its best and worst images, its recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caaseg.config import Recipe
from caaseg.data.sample import Color
from caaseg.evaluation.best_worst import BestWorstImages
from caaseg.evaluation.evaluate import Evaluation
from caaseg.recipes import recipe_text
from caaseg.reports.curves import Line, as_svg, draw_lines
from caaseg.reports.evaluation import evaluation_sections
from caaseg.reports.page import write_page

Journal = Sequence[dict[str, Any]]
"""The lines of a run's metrics.jsonl."""


def write_run_page(
    path: Path,
    *,
    recipe: Recipe,
    journal: Journal,
    evaluation: Evaluation,
    extremes: BestWorstImages,
    palette: Sequence[Color],
    origin: dict[str, Any],
) -> None:
    """Write the report.

    Args:
        path: the page.
        recipe: what was run.
        journal: what it measured on the way.
        evaluation: of the final model on the validation split.
        extremes: the images it did best and worst on.
        palette: colors of the classes.
        origin: hardware and versions, as `provenance` gives them.
    """
    scores = [(line["val_mean_iou"], -line["step"]) for line in journal if line.get("val_mean_iou") is not None]
    best = max(scores, default=None)
    write_page(
        path,
        "run.html.j2",
        title=f"{recipe.model.head} on {recipe.model.backbone}, {recipe.data.dataset}",
        recipe=recipe,
        recipe_text=recipe_text(recipe),
        best=None if best is None else {"score": best[0], "step": -best[1]},
        seconds=training_seconds(journal, recipe.batch_size),
        curves=run_curves(journal),
        **evaluation_sections(evaluation, extremes, palette),
        origin=origin,
    )


def run_curves(journal: Journal) -> list[dict[str, Any]]:
    """What the run measured on the way, a figure each."""
    panels = (
        ("training loss", "loss", 1, True),
        ("mean IoU on the validation split, %", "val_mean_iou", 100, False),
        ("learning rate", "lr", 1, True),
        ("images a second", "images_per_second", 1, True),
    )
    figures = []
    for number, (caption, key, factor, from_zero) in enumerate(panels):
        line = line_of(journal, key, caption, factor)
        if line.steps:
            svg = as_svg(draw_lines([line], from_zero=from_zero), f"curve-{number}")
            figures.append({"caption": caption, "svg": svg})
    return figures


def line_of(journal: Journal, key: str, name: str, factor: float = 1) -> Line:
    """One number of a journal over the steps; lines that lack it are left out."""
    found = [(line["step"], factor * line[key]) for line in journal if line.get(key) is not None]
    return Line(name, [step for step, _ in found], [value for _, value in found])


def training_seconds(journal: Journal, batch_size: int) -> float:
    """How long the steps took, without validation and saving, however often the run was interrupted."""
    seconds, before = 0.0, 0
    for line in journal:
        if line.get("images_per_second"):
            seconds += (line["step"] - before) * batch_size / line["images_per_second"]
            before = line["step"]
    return seconds
