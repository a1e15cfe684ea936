"""Report of the demo: the shipped model on a photo, and an FCN and a CAA model side by side, with their findings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from caaseg.analysis.pixel_attention import PixelAttention
from caaseg.config import Recipe
from caaseg.data.datasets.scenes import FIRST_HOUSE, Scenes
from caaseg.data.sample import IGNORE, Color, Sample
from caaseg.drawing.overlays import class_legend
from caaseg.evaluation.evaluate import Evaluation
from caaseg.recipes import recipe_text
from caaseg.reports.curves import as_svg
from caaseg.reports.curves import draw_lines as draw_curves
from caaseg.reports.evaluation import ABSENT
from caaseg.reports.page import (
    Picture,
    percent,
    picture,
    picture_of_image,
    picture_of_labels,
    picture_of_marks,
    write_page,
)
from caaseg.reports.pixel_attention import draw_lines, draw_reach
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


class DemoPhoto(NamedTuple):
    """A photo, its prediction, and the attention of one pixel."""

    image: Tensor  # (3, H, W) uint8
    labels: Tensor  # (H, W) uint8
    classes: Sequence[str]
    palette: Sequence[Color]
    attention: PixelAttention
    pixel: tuple[int, int]  # row and column

    @property
    def pictures(self) -> list[Picture]:
        pixels = self.image.permute(1, 2, 0).numpy()
        lines = draw_lines(pixels, self.attention, self.pixel)
        return [
            picture_of_image(self.image, "photo"),
            picture_of_labels(self.image, self.labels, self.palette, "prediction"),
            *([] if lines is None else [picture(lines, "attention along its column and row")]),
            picture(draw_reach(pixels, self.attention, self.pixel), "attention over the whole photo"),
        ]


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
    photo: DemoPhoto,
    models: Mapping[str, DemoModel] | None = None,
    samples: Sequence[Sample] = (),
    *,
    reports: Mapping[str, str] | None = None,
    origin: dict[str, Any],
) -> None:
    """Write the report.

    Args:
        path: the HTML file.
        photo: prediction of the shipped model.
        models: "FCN" and "CAA"; None while they are trained.
        samples: the scenes to show.
        reports: path of each model's own report, relative to the page.
        origin: hardware and versions, from `provenance`.
    """
    write_page(
        path,
        "demo.html.j2",
        title="caaseg demo",
        photo={
            "name": photo.classes[int(photo.labels[photo.pixel])],
            "pixel": photo.pixel,
            "legend": class_legend([photo.labels], photo.classes, photo.palette),
            "pictures": photo.pictures,
        },
        trained=models is not None,
        origin=origin,
        **({} if models is None else _comparison(models, samples, reports or {})),
    )


def _comparison(
    models: Mapping[str, DemoModel], samples: Sequence[Sample], reports: Mapping[str, str]
) -> dict[str, Any]:
    """Return the template values of both trained models."""
    fcn, caa = models["FCN"], models["CAA"]
    curves = []
    for caption, key, factor in (
        ("mean IoU on the validation split, %", "val_mean_iou", 100),
        ("training loss", "loss", 1),
    ):
        lines = [curve_of(model.metrics, key, name, factor) for name, model in (("CAA", caa), ("FCN", fcn))]
        curves.append({"caption": caption, "svg": as_svg(draw_curves(lines, from_zero=True), f"curve-{key}")})
    return {
        "fcn": fcn,
        "caa": caa,
        "findings": findings(fcn.scores, caa.scores),
        "curves": curves,
        "classes": [
            {"name": name, "color": Scenes.palette[k], "fcn": fcn.evaluation.iou[k], "caa": caa.evaluation.iou[k]}
            for k, name in enumerate(Scenes.classes)
        ],
        "absent": ABSENT,
        "cases": [
            {"name": sample.name, "pictures": _pictures(sample, fcn.predictions[k], caa.predictions[k])}
            for k, sample in enumerate(samples)
        ],
        "marks": [("only CAA is right", CAA_RIGHT), ("only FCN is right", FCN_RIGHT), ("both are wrong", BOTH_WRONG)],
        "recipes": {name: recipe_text(model.recipe) for name, model in models.items()},
        "reports": reports,
    }


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
