"""Results of an evaluation: score table, sentences and JSON for the command line, and the HTML page."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.table import Table
from rich.text import Text

from caaseg.data.catalogue import find
from caaseg.data.sample import IGNORE, Color
from caaseg.drawing.overlays import background_class, class_legend
from caaseg.evaluation.best_worst import BestWorstImages, ScoredImage
from caaseg.evaluation.evaluate import Evaluation
from caaseg.models.predictor import Predictor
from caaseg.reports.page import (
    data_url,
    percent,
    picture_of_image,
    picture_of_labels,
    picture_of_marks,
    write_page,
)

ABSENT = (
    "Ignored pixels are not scored; a class that occurs in neither labels nor predictions has no IoU, a class without "
    "labels has no accuracy, and means skip such classes"
)
RED: Color = (225, 45, 60)
HEAT: Color = (42, 140, 196)  # visible on white and on black
MAX_TABLE_CLASSES = 24  # with more classes, the confusion matrix is a heat map instead of a table of numbers
MAX_CONFUSIONS = 20


def score_table(evaluation: Evaluation) -> Table:
    """Return a table with one row per class, in percent, and the means below. Undefined scores are empty."""
    columns = {
        "IoU": (evaluation.iou, evaluation.mean_iou),
        "accuracy": (evaluation.accuracy, evaluation.mean_accuracy),
    }
    if evaluation.boundary_iou is not None and evaluation.mean_boundary_iou is not None:
        columns["boundary IoU"] = (evaluation.boundary_iou, evaluation.mean_boundary_iou)
    table = Table(show_footer=True)
    table.add_column("id", justify="right")
    table.add_column("class", footer="mean")
    for heading, (_, mean) in columns.items():
        table.add_column(heading, footer=percent(mean, 2, ""), justify="right")
    for k, name in enumerate(evaluation.classes):
        table.add_row(str(k), Text(name), *(percent(scores[k], 2, "") for scores, _ in columns.values()))
    return table


def describe_data(dataset: str, split: str, evaluation: Evaluation) -> str:
    """Return dataset, number of classes, split and number of images as text."""
    return f"{find(dataset).title} ({dataset}, {len(evaluation.classes)} classes), {split}: {evaluation.images} images"


def describe_protocol(predictor: Predictor, output_stride: int | None) -> str:
    """Return the scoring options as text: size, scales, flips, windows, averaging, output stride and precision."""
    several = len(predictor.scales) > 1
    window = predictor.window
    size = predictor.size if isinstance(predictor.size, tuple) else (predictor.size,)
    options = [
        *([] if size == ("auto",) else [f"size {' x '.join(map(str, size))}"]),
        f"scale{'s' * several} {', '.join(f'{scale:g}' for scale in predictor.scales)}",
        "with flipped images" if predictor.flip else "no flips",
        "whole images"
        if window is None
        else f"windows of {window[0]} x {window[1]} with an overlap of {predictor.overlap:.0%}",
        *([f"{predictor.average} averaged"] if several or predictor.flip or window else []),
        *([] if output_stride is None else [f"output stride {output_stride}"]),
        "bf16" if predictor.precision == "bf16" else "float32",
    ]
    return ", ".join(options)


def score_lines(evaluation: Evaluation, data: str, protocol: str) -> list[str]:
    """Return the lines printed below the score table: data, speed, protocol, scores, and classes without scores."""
    speed = f"{evaluation.seconds:.1f} s, {evaluation.images / evaluation.seconds:.3g} images per second"
    described = [f"{data}; {speed}", protocol]
    if not evaluation.confusion.any():
        return [*described, "No pixel of this split is labeled, so there are no scores."]
    scores = {
        "mean IoU": evaluation.mean_iou,
        "pixel accuracy": evaluation.pixel_accuracy,
        "mean accuracy": evaluation.mean_accuracy,
    }
    if evaluation.mean_boundary_iou is not None:
        scores["mean boundary IoU"] = evaluation.mean_boundary_iou
    without_iou, without_accuracy = (
        ", ".join(_without(evaluation.classes, values)) or "none" for values in (evaluation.iou, evaluation.accuracy)
    )
    return [
        *described,
        ", ".join(f"{name} {percent(score, 2, '')}" for name, score in scores.items()),
        f"{ABSENT}. Without IoU: {without_iou}; without accuracy: {without_accuracy}.",
    ]


def scores_as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores and the confusion matrix as plain values; undefined scores are None."""

    def number(score: float | None) -> float | None:
        return None if score is None or math.isnan(score) else score

    boundary_iou = evaluation.boundary_iou or [None] * len(evaluation.classes)
    return {
        "images": evaluation.images,
        "seconds": evaluation.seconds,
        "mean_iou": number(evaluation.mean_iou),
        "pixel_accuracy": number(evaluation.pixel_accuracy),
        "mean_accuracy": number(evaluation.mean_accuracy),
        "mean_boundary_iou": number(evaluation.mean_boundary_iou),
        "classes": [
            {"name": name, "iou": number(iou), "accuracy": number(accuracy), "boundary_iou": number(boundary)}
            for name, iou, accuracy, boundary in zip(
                evaluation.classes, evaluation.iou, evaluation.accuracy, boundary_iou, strict=True
            )
        ],
        "confusion": evaluation.confusion.tolist(),
        "absent": ABSENT,
    }


def write_evaluation_page(
    path: Path,
    *,
    title: str,
    data: str,
    protocol: str,
    evaluation: Evaluation,
    best_worst: BestWorstImages,
    palette: Sequence[Color],
    origin: dict[str, Any],
) -> None:
    """Write the page of an evaluation.

    Args:
        path: the HTML file.
        title: name of the model.
        data: dataset and split, from `describe_data`.
        protocol: scoring options, from `describe_protocol`.
        evaluation: the scores.
        best_worst: the best and worst images.
        palette: colors of the classes.
        origin: hardware and versions, from `provenance`.
    """
    sections = evaluation_sections(evaluation, best_worst, palette)
    write_page(path, "evaluation.html.j2", title=title, data=data, protocol=protocol, **sections, origin=origin)


def evaluation_sections(
    evaluation: Evaluation, best_worst: BestWorstImages, palette: Sequence[Color]
) -> dict[str, Any]:
    """Return the template values of the sections: scores per class, confusion matrix, best and worst images."""
    pixels = evaluation.confusion.sum(1).double()
    labeled = max(1.0, float(pixels.sum()))
    classes = [
        {"name": name, "color": tuple(palette[k]), "iou": evaluation.iou[k], "accuracy": evaluation.accuracy[k]}
        | {"share": float(pixels[k]) / labeled}
        for k, name in enumerate(evaluation.classes)
    ]
    shares = row_shares(evaluation.confusion.numpy())
    many = len(classes) > MAX_TABLE_CLASSES
    background = background_class(evaluation.classes)
    shown = [labels for s in (*best_worst.best, *best_worst.worst) for labels in (s.label, s.prediction)]
    return {
        "evaluation": evaluation,
        "absent": ABSENT,
        "without_iou": _without(evaluation.classes, evaluation.iou),
        "classes": classes,
        "rows": [] if many else shares.tolist(),
        "heat": heat_map(shares) if many else None,
        "confusions": largest_confusions(shares, evaluation.classes) if many else [],
        "best_images": [_case(scored, palette, background) for scored in best_worst.best],
        "worst_images": [_case(scored, palette, background) for scored in best_worst.worst],
        "legend": class_legend(shown, evaluation.classes, palette) if shown else [],
    }


def row_shares(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """Normalize the rows of a confusion matrix (K, K); rows of classes without labeled pixels are zero."""
    shares: NDArray[np.float64] = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    return shares


def largest_confusions(shares: NDArray[np.float64], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the pairs of true and predicted class with the largest shares of errors, largest first."""
    wrong = shares * (1 - np.eye(len(shares)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSIONS]
    pairs = [divmod(int(k), len(shares)) for k in order]
    return [
        {"truth": classes[truth], "prediction": classes[prediction], "share": float(wrong[truth, prediction])}
        for truth, prediction in pairs
        if wrong[truth, prediction] > 0
    ]


def heat_map(shares: NDArray[np.float64]) -> str:
    """Return a data URL of an image with one pixel per cell. Opacity encodes the share, for light and dark pages."""
    cells = np.empty((*shares.shape, 4), np.uint8)
    cells[..., :3] = HEAT
    cells[..., 3] = (255 * np.sqrt(shares)).round()  # the square root keeps small shares visible
    return data_url(Image.fromarray(cells))


def _without(classes: Sequence[str], scores: Sequence[float]) -> list[str]:
    """Return the classes without a score."""
    return [name for name, score in zip(classes, scores, strict=True) if math.isnan(score)]


def _case(scored: ScoredImage, palette: Sequence[Color], background: int | None) -> dict[str, Any]:
    wrong = (scored.prediction != scored.label) & (scored.label != IGNORE)
    pictures = [
        picture_of_image(scored.image),
        picture_of_labels(scored.image, scored.label, palette, "ground truth", background),
        picture_of_labels(scored.image, scored.prediction, palette, "prediction", background),
        picture_of_marks(scored.image, [(wrong, RED)], scored.label, "errors"),
    ]
    return {"name": scored.name, "score": scored.mean_iou, "pictures": pictures}
