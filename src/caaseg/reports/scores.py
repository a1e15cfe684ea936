"""How a model scored: a table, what it was scored by, and the same as plain values."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from caaseg.data.catalogue import find
from caaseg.evaluation.evaluate import Evaluation
from caaseg.models.predictor import Predictor

ABSENT = (
    "Ignored pixels do not count; a class that neither labels nor predictions have has no IoU, one without labels no "
    "accuracy, and means leave them out"
)


def score_table(evaluation: Evaluation) -> Table:
    """A line a class, in %, and the means below. What cannot be scored is empty."""
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
        table.add_column(heading, footer=_percent(mean), justify="right")
    for k, name in enumerate(evaluation.classes):
        table.add_row(str(k), Text(name), *(_percent(scores[k]) for scores, _ in columns.values()))
    return table


def protocol(dataset: str, split: str, evaluation: Evaluation) -> str:
    """On what: the dataset, as its classes are counted, and the split."""
    return f"{find(dataset).title} ({dataset}, {len(evaluation.classes)} classes), {split}: {evaluation.images} images"


def manner(predictor: Predictor, output_stride: int) -> str:
    """How: what makes two scores of the same model differ."""
    several = len(predictor.scales) > 1
    words = [
        f"scale{'s' * several} {', '.join(f'{scale:g}' for scale in predictor.scales)}",
        "with mirrored images" if predictor.flip else "not mirrored",
        "whole images"
        if predictor.window is None
        else "windows of {} x {}".format(*predictor.window) + f" that overlap by {predictor.overlap:.0%}",
        *([f"{predictor.average} averaged"] if several or predictor.flip or predictor.window else []),
        f"output stride {output_stride}",
        "bf16" if predictor.precision == "bf16" else "32 bits",
    ]
    return ", ".join(words)


def lines(evaluation: Evaluation, on: str, how: str) -> list[str]:
    """What was scored and how, the scores over all classes, and how classes that are not in the data were treated."""
    speed = f"{evaluation.seconds:.1f} s, {evaluation.images / evaluation.seconds:.3g} images a second"
    described = [f"{on}; {speed}", how]
    if not evaluation.confusion.any():
        return [*described, "No pixel of this split is labelled: there is nothing to score by."]
    scores = {
        "mean IoU": evaluation.mean_iou,
        "pixel accuracy": evaluation.pixel_accuracy,
        "mean accuracy": evaluation.mean_accuracy,
    }
    if evaluation.mean_boundary_iou is not None:
        scores["mean boundary IoU"] = evaluation.mean_boundary_iou
    absent = _names(evaluation.classes, evaluation.iou)
    unlabelled = _names(evaluation.classes, evaluation.accuracy)
    return [
        *described,
        ", ".join(f"{name} {_percent(score)}" for name, score in scores.items()),
        f"{ABSENT}: without IoU here {absent or 'none'}, without accuracy {unlabelled or 'none'}.",
    ]


def scores_as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Plain values; null where there is no score."""
    return {
        "images": evaluation.images,
        "seconds": evaluation.seconds,
        "mean_iou": _number(evaluation.mean_iou),
        "pixel_accuracy": _number(evaluation.pixel_accuracy),
        "mean_accuracy": _number(evaluation.mean_accuracy),
        "mean_boundary_iou": _number(evaluation.mean_boundary_iou),
        "classes": [
            {
                "name": name,
                "iou": _number(evaluation.iou[k]),
                "accuracy": _number(evaluation.accuracy[k]),
                "boundary_iou": None if evaluation.boundary_iou is None else _number(evaluation.boundary_iou[k]),
            }
            for k, name in enumerate(evaluation.classes)
        ],
        "confusion": evaluation.confusion.tolist(),
        "absent": ABSENT,
    }


def _names(classes: Sequence[str], scores: Sequence[float]) -> str:
    return ", ".join(name for name, score in zip(classes, scores, strict=True) if math.isnan(score))


def _percent(score: float) -> str:
    return "" if math.isnan(score) else f"{100 * score:.2f}"


def _number(score: float | None) -> float | None:
    return None if score is None or math.isnan(score) else score
