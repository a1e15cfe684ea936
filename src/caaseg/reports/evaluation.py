"""How a model did on a split, as a page: scores class by class, what it takes for what, its best and worst images."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.sample import IGNORE, Color
from caaseg.evaluation.best_worst import BestWorstImages, ScoredImage
from caaseg.evaluation.evaluate import Evaluation
from caaseg.reports.page import (
    Picture,
    data_address,
    picture_of_image,
    picture_of_labels,
    picture_of_marks,
    write_page,
)
from caaseg.reports.scores import ABSENT

RED: Color = (225, 45, 60)
HEAT: Color = (42, 140, 196)  # seen on white and on black
MOST_CELLS = 24  # classes whose confusion matrix is a table with numbers
CONFUSIONS = 20


def write_evaluation_page(
    path: Path,
    *,
    title: str,
    on: str,
    how: str,
    evaluation: Evaluation,
    extremes: BestWorstImages,
    palette: Sequence[Color],
    origin: dict[str, Any],
) -> None:
    """Write the page of an evaluation.

    Args:
        path: the page.
        title: the model's name.
        on: what it was scored on.
        how: the manner in which it was.
        evaluation: its scores.
        extremes: the images it did best and worst on.
        palette: colors of the classes.
        origin: hardware and versions, as `provenance` gives them.
    """
    sections = evaluation_sections(evaluation, extremes, palette)
    write_page(path, "evaluation.html.j2", title=title, on=on, how=how, **sections, origin=origin)


def evaluation_sections(evaluation: Evaluation, extremes: BestWorstImages, palette: Sequence[Color]) -> dict[str, Any]:
    """What the sections of an evaluation are made of."""
    pixels = evaluation.confusion.sum(1).double()
    labelled = max(1.0, float(pixels.sum()))
    classes = [
        {"name": name, "color": tuple(palette[k]), "iou": evaluation.iou[k], "accuracy": evaluation.accuracy[k]}
        | {"share": float(pixels[k]) / labelled}
        for k, name in enumerate(evaluation.classes)
    ]
    shares = row_shares(evaluation.confusion.numpy())
    many = len(classes) > MOST_CELLS
    return {
        "evaluation": evaluation,
        "absent": ABSENT,
        "without_iou": [name for name, iou in zip(evaluation.classes, evaluation.iou, strict=True) if math.isnan(iou)],
        "classes": classes,
        "rows": [] if many else shares.tolist(),
        "heat": heat_map(shares) if many else None,
        "confusions": largest_confusions(shares, evaluation.classes) if many else [],
        "best_images": [_case(scored, palette) for scored in extremes.best],
        "worst_images": [_case(scored, palette) for scored in extremes.worst],
    }


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


def _case(scored: ScoredImage, palette: Sequence[Color]) -> dict[str, Any]:
    wrong = (scored.prediction != scored.label) & (scored.label != IGNORE)
    pictures: list[Picture] = [
        picture_of_image(scored.image),
        picture_of_labels(scored.image, scored.label, palette, "truth"),
        picture_of_labels(scored.image, scored.prediction, palette, "prediction"),
        picture_of_marks(scored.image, [(wrong, RED)], scored.label, "where they differ"),
    ]
    return {"name": scored.name, "score": scored.mean_iou, "pictures": pictures}
