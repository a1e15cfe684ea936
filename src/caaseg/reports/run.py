"""The report of a training run: its curves, its scores class by class, its best and worst images, its recipe."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caaseg.config import Recipe
from caaseg.data.sample import IGNORE, Colour
from caaseg.evaluation.evaluate import Evaluation
from caaseg.evaluation.extremes import Extremes, Scored
from caaseg.recipe_files import recipe_text
from caaseg.reports.curves import Line, as_svg, draw_lines
from caaseg.reports.page import (
    Picture,
    data_address,
    picture_of_image,
    picture_of_labels,
    picture_of_marks,
    write_page,
)
from caaseg.reports.scores import ABSENT

RED: Colour = (225, 45, 60)
HEAT: Colour = (42, 140, 196)  # seen on white and on black
MOST_CELLS = 24  # classes whose confusion matrix is a table with numbers
CONFUSIONS = 20

Journal = Sequence[dict[str, Any]]
"""The lines of a run's metrics.jsonl."""


def write_run_page(
    path: Path,
    *,
    recipe: Recipe,
    journal: Journal,
    evaluation: Evaluation,
    extremes: Extremes,
    palette: Sequence[Colour],
    origin: dict[str, Any],
) -> None:
    """Write the report.

    Args:
        path: the page.
        recipe: what was run.
        journal: what it measured on the way.
        evaluation: of the final model on the validation split.
        extremes: the images it did best and worst on.
        palette: colours of the classes.
        origin: hardware and versions, as `provenance` gives them.
    """
    pixels = evaluation.confusion.sum(1).double()
    labelled = max(1.0, float(pixels.sum()))
    classes = [
        {"name": name, "colour": tuple(palette[k]), "iou": evaluation.iou[k], "accuracy": evaluation.accuracy[k]}
        | {"share": float(pixels[k]) / labelled}
        for k, name in enumerate(evaluation.classes)
    ]
    shares = row_shares(evaluation.confusion.numpy())
    many = len(classes) > MOST_CELLS
    scores = [(line["val_mean_iou"], -line["step"]) for line in journal if line.get("val_mean_iou") is not None]
    best = max(scores, default=None)
    write_page(
        path,
        "run.html.j2",
        title=f"{recipe.model.head} on {recipe.model.backbone}, {recipe.data.dataset}",
        recipe=recipe,
        recipe_text=recipe_text(recipe),
        evaluation=evaluation,
        best=None if best is None else {"score": best[0], "step": -best[1]},
        seconds=training_seconds(journal, recipe.batch_size),
        curves=run_curves(journal),
        absent=ABSENT,
        without_iou=[name for name, iou in zip(evaluation.classes, evaluation.iou, strict=True) if math.isnan(iou)],
        classes=classes,
        rows=[] if many else shares.tolist(),
        heat=heat_map(shares) if many else None,
        confusions=largest_confusions(shares, evaluation.classes) if many else [],
        best_images=[_case(scored, palette) for scored in extremes.best],
        worst_images=[_case(scored, palette) for scored in extremes.worst],
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


def row_shares(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """(K, K) counts as shares of their rows; a class without labelled pixels has zeros."""
    shares: NDArray[np.float64] = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    return shares


def largest_confusions(shares: NDArray[np.float64], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Which classes are most often taken for which other."""
    wrong = shares * (1 - np.eye(len(shares)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSIONS]
    pairs = [(int(k) // len(shares), int(k) % len(shares)) for k in order]
    return [
        {"truth": classes[truth], "prediction": classes[prediction], "share": float(wrong[truth, prediction])}
        for truth, prediction in pairs
        if wrong[truth, prediction] > 0
    ]


def heat_map(shares: NDArray[np.float64]) -> str:
    """A pixel a cell, the more opaque the larger its share: one picture for light and for dark pages."""
    cells = np.empty((*shares.shape, 4), np.uint8)
    cells[..., :3] = HEAT
    cells[..., 3] = (255 * np.sqrt(shares)).round()  # small shares, which are the errors, stay visible
    written = io.BytesIO()
    Image.fromarray(cells).save(written, "PNG", optimize=True)
    return data_address(written.getvalue(), "image/png")


def _case(scored: Scored, palette: Sequence[Colour]) -> dict[str, Any]:
    wrong = (scored.prediction != scored.label) & (scored.label != IGNORE)
    pictures: list[Picture] = [
        picture_of_image(scored.image),
        picture_of_labels(scored.image, scored.label, palette, "truth"),
        picture_of_labels(scored.image, scored.prediction, palette, "prediction"),
        picture_of_marks(scored.image, [(wrong, RED)], scored.label, "where they differ"),
    ]
    return {"name": scored.name, "score": scored.mean_iou, "pictures": pictures}
