"""Report of the demo: an FCN and a CAA model side by side, with sentences derived from the scores."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from caaseg.config import Recipe
from caaseg.data.datasets.scenes import FIRST_HOUSE, Scenes
from caaseg.data.sample import IGNORE, Color, Sample
from caaseg.evaluation.evaluate import Evaluation
from caaseg.recipes import recipe_text
from caaseg.reports.curves import as_svg, draw_lines
from caaseg.reports.evaluation import ABSENT
from caaseg.reports.page import Picture, percent, picture_of_image, picture_of_labels, picture_of_marks, write_page
from caaseg.reports.run import Metrics, curve_of, training_seconds

CAA_RIGHT: Color = (20, 120, 165)
FCN_RIGHT: Color = (225, 45, 60)
BOTH_WRONG: Color = (235, 170, 40)

HOUSES = len(Scenes.classes) - FIRST_HOUSE
CHANCE = 1 / (2 * HOUSES - 1)
"""IoU of random house colors: with 4 colors, n/4 of n pixels are right and the union has 2n - n/4 pixels."""

SAME = 0.01  # smaller differences of scores are reported as equal
LEARNED = 0.5  # IoU from which houses count as learned
NOT_LEARNED = 0.2  # IoU up to which they count as not learned


class DemoScores(NamedTuple):
    """Mean IoU of groups of classes, 0 to 1."""

    mean_iou: float
    near: float  # regions and lamps, which a few neighboring pixels identify
    far: float  # houses, which only a distant lamp identifies


class DemoModel(NamedTuple):
    """One of the two models with its training metrics and results."""

    recipe: Recipe
    metrics: Metrics
    evaluation: Evaluation  # on the test split
    predictions: Sequence[Tensor]  # (H, W) for each sample shown

    @property
    def training_s(self) -> float:
        return training_seconds(self.metrics, self.recipe.batch_size)

    @property
    def scores(self) -> DemoScores:
        iou = self.evaluation.iou
        return DemoScores(self.evaluation.mean_iou, _mean(iou[:FIRST_HOUSE]), _mean(iou[FIRST_HOUSE:]))


def findings(fcn: DemoScores, caa: DemoScores) -> list[str]:
    """Return one sentence each about all classes, houses, and the other classes."""
    overall = f"Over all classes, CAA has {percent(caa.mean_iou)} % mean IoU and FCN {percent(fcn.mean_iou)} %: "
    gap = caa.mean_iou - fcn.mean_iou
    if math.isnan(gap):
        overall += "they cannot be compared."
    elif abs(gap) < SAME:
        overall += "no notable difference."
    else:
        overall += f"{_lead(gap)}."
    houses = (
        f"On houses, whose color only a distant lamp reveals, CAA has {percent(caa.far)} % and FCN "
        f"{percent(fcn.far)} %; random colors give about {percent(CHANCE)} %. {_on_houses(fcn.far, caa.far)}"
    )
    near = (
        "On regions and lamps, which a few neighboring pixels identify, "
        f"CAA has {percent(caa.near)} % and FCN {percent(fcn.near)} %"
    )
    gap = caa.near - fcn.near
    near += "." if math.isnan(gap) or abs(gap) < SAME else f": here {_lead(gap)}."
    return [overall, houses, near]


def _lead(gap: float) -> str:
    return f"{'CAA' if gap > 0 else 'FCN'} is {100 * abs(gap):.1f} points ahead"


def _on_houses(fcn: float, caa: float) -> str:
    if math.isnan(fcn) or math.isnan(caa):
        return "Houses were not scored."
    (worse_iou, worse), (better_iou, better) = sorted([(fcn, "FCN"), (caa, "CAA")])
    if worse_iou >= LEARNED:
        return "Both learned to distinguish them."
    if better_iou >= LEARNED:
        extent = "did not" if worse_iou <= NOT_LEARNED else "only partly"
        return f"{better} learned to distinguish them, and {worse} {extent}."
    if better_iou <= NOT_LEARNED:
        return "Neither learned to distinguish them."
    if worse_iou <= NOT_LEARNED:
        return f"{better} partly learned to distinguish them, and {worse} did not."
    return "Both partly learned to distinguish them."


def write_demo_page(
    path: Path,
    models: Mapping[str, DemoModel],
    samples: Sequence[Sample],
    *,
    reports: Mapping[str, str],
    origin: dict[str, Any],
) -> None:
    """Write the report.

    Args:
        path: the HTML file.
        models: "FCN" and "CAA".
        samples: the scenes to show.
        reports: path of each model's own report, relative to the page.
        origin: hardware and versions, from `provenance`.
    """
    fcn, caa = models["FCN"], models["CAA"]
    curves = []
    for caption, key, factor in (
        ("mean IoU on the validation split, %", "val_mean_iou", 100),
        ("training loss", "loss", 1),
    ):
        lines = [curve_of(model.metrics, key, name, factor) for name, model in (("CAA", caa), ("FCN", fcn))]
        curves.append({"caption": caption, "svg": as_svg(draw_lines(lines, from_zero=True), f"curve-{key}")})
    classes = [
        {"name": name, "color": Scenes.palette[k], "fcn": fcn.evaluation.iou[k], "caa": caa.evaluation.iou[k]}
        for k, name in enumerate(Scenes.classes)
    ]
    write_page(
        path,
        "demo.html.j2",
        title="FCN and CAA on synthetic scenes",
        fcn=fcn,
        caa=caa,
        findings=findings(fcn.scores, caa.scores),
        curves=curves,
        classes=classes,
        absent=ABSENT,
        cases=[
            {"name": sample.name, "pictures": _pictures(sample, fcn.predictions[k], caa.predictions[k])}
            for k, sample in enumerate(samples)
        ],
        marks=[("only CAA is right", CAA_RIGHT), ("only FCN is right", FCN_RIGHT), ("both are wrong", BOTH_WRONG)],
        recipes={name: recipe_text(model.recipe) for name, model in models.items()},
        reports=reports,
        origin=origin,
    )


def _pictures(sample: Sample, fcn: Tensor, caa: Tensor) -> list[Picture]:
    image, label, palette = sample.image, sample.label, Scenes.palette
    differ = (fcn != caa) & (label != IGNORE)
    marks = [(differ, BOTH_WRONG), (differ & (caa == label), CAA_RIGHT), (differ & (fcn == label), FCN_RIGHT)]
    return [
        picture_of_image(image),
        picture_of_labels(image, label, palette, "ground truth"),
        picture_of_labels(image, fcn, palette, "FCN"),
        picture_of_labels(image, caa, palette, "CAA"),
        picture_of_marks(image, marks, label, "differences"),
    ]


def _mean(scores: Sequence[float]) -> float:
    known = [score for score in scores if not math.isnan(score)]
    return sum(known) / len(known) if known else math.nan
