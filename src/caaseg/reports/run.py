"""Report of a training run: curves, scores per class, best and worst images, recipe."""

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

Metrics = Sequence[dict[str, Any]]
"""The lines of a run's metrics.jsonl."""


def write_run_page(
    path: Path,
    *,
    recipe: Recipe,
    metrics: Metrics,
    evaluation: Evaluation,
    best_worst: BestWorstImages,
    palette: Sequence[Color],
    origin: dict[str, Any],
) -> None:
    """Write the report.

    Args:
        path: the HTML file.
        recipe: recipe of the run.
        metrics: metrics logged during training.
        evaluation: scores of the final model on the validation split.
        best_worst: the best and worst images.
        palette: colors of the classes.
        origin: hardware and versions, from `provenance`.
    """
    scores = [(line["val_mean_iou"], -line["step"]) for line in metrics if line.get("val_mean_iou") is not None]
    best = max(scores, default=None)
    write_page(
        path,
        "run.html.j2",
        title=f"{recipe.model.head} on {recipe.model.backbone}, {recipe.data.dataset}",
        recipe=recipe,
        step=recipe.steps if recipe.early_stopping is None else max(line["step"] for line in metrics),
        recipe_text=recipe_text(recipe),
        best=None if best is None else {"score": best[0], "step": -best[1]},
        seconds=training_seconds(metrics, recipe.batch_size),
        curves=_curves(metrics),
        **evaluation_sections(evaluation, best_worst, palette),
        origin=origin,
    )


def _curves(metrics: Metrics) -> list[dict[str, Any]]:
    panels = (
        ("training loss", "loss", 1, True),
        ("mean IoU on the validation split, %", "val_mean_iou", 100, False),
        ("learning rate", "lr", 1, True),
        ("images per second", "images_per_second", 1, True),
    )
    lines = [(curve_of(metrics, key, caption, factor), from_zero) for caption, key, factor, from_zero in panels]
    return [
        {"caption": line.name, "svg": as_svg(draw_lines([line], from_zero=from_zero), f"curve-{index}")}
        for index, (line, from_zero) in enumerate(lines)
        if line.steps
    ]


def curve_of(metrics: Metrics, key: str, name: str, factor: float = 1) -> Line:
    """Return one metric over the steps as a line; metrics lines without it are skipped."""
    found = [(line["step"], factor * line[key]) for line in metrics if line.get(key) is not None]
    return Line(name, [step for step, _ in found], [value for _, value in found])


def training_seconds(metrics: Metrics, batch_size: int) -> float:
    """Return the duration of all training steps, without validation, checkpoints and interruptions."""
    seconds, previous = 0.0, 0
    for line in metrics:
        if line.get("images_per_second"):
            seconds += (line["step"] - previous) * batch_size / line["images_per_second"]
            previous = line["step"]
    return seconds
