"""The report of the demonstration: an FCN and a CAA model side by side, and in words what came out."""

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
from caaseg.reports.page import Picture, percent, picture_of_image, picture_of_labels, picture_of_marks, write_page
from caaseg.reports.run import Journal, line_of, training_seconds
from caaseg.reports.scores import ABSENT

CAA_RIGHT: Color = (20, 120, 165)
FCN_RIGHT: Color = (225, 45, 60)
BOTH_WRONG: Color = (235, 170, 40)

HOUSES = len(Scenes.classes) - FIRST_HOUSE
GUESSING = 1 / (2 * HOUSES - 1)
"""IoU of one who sees the houses and guesses their colors: of n pixels n / 4 are right, 2n - n / 4 in the union."""

SAME = 0.01  # scores closer than this are not told apart
LEARNED = 0.5
BARELY = 0.2


class Contender(NamedTuple):
    """One of the two models."""

    recipe: Recipe
    journal: Journal
    evaluation: Evaluation  # on the test split
    predictions: Sequence[Tensor]  # (H, W) of each sample shown

    @property
    def training_s(self) -> float:
        return training_seconds(self.journal, self.recipe.batch_size)

    @property
    def outcome(self) -> "Outcome":
        iou = self.evaluation.iou
        return Outcome(self.evaluation.mean_iou, _mean(iou[:FIRST_HOUSE]), _mean(iou[FIRST_HOUSE:]))


class Outcome(NamedTuple):
    """What a model came to, from 0 to 1."""

    mean_iou: float
    near: float  # mean IoU of what can be told from a few pixels around: regions and lamps
    far: float  # of what can be told from afar alone: houses


def finding(fcn: Outcome, caa: Outcome) -> list[str]:
    """What the numbers say, whichever way they point."""
    overall = f"Over all classes CAA has {percent(caa.mean_iou)} % mean IoU and FCN {percent(fcn.mean_iou)} %: "
    gap = caa.mean_iou - fcn.mean_iou
    if math.isnan(gap):
        overall += "there is nothing to compare."
    elif abs(gap) < SAME:
        overall += "no difference to speak of."
    else:
        overall += f"{'CAA' if gap > 0 else 'FCN'} is {100 * abs(gap):.1f} points ahead."
    houses = (
        f"On the houses, whose color only a lamp far away tells, CAA has {percent(caa.far)} % and FCN "
        f"{percent(fcn.far)} %; guessing the colors gives about {percent(GUESSING)} %. {_on_houses(fcn.far, caa.far)}"
    )
    gap = caa.near - fcn.near
    near = f"On regions and lamps, which a few pixels tell, CAA has {percent(caa.near)} % and FCN {percent(fcn.near)} %"
    if math.isnan(gap) or abs(gap) < SAME:
        near += "."
    else:
        near += f": here {'CAA' if gap > 0 else 'FCN'} is {100 * abs(gap):.1f} points ahead."
    return [overall, houses, near]


def _on_houses(fcn: float, caa: float) -> str:
    if math.isnan(fcn) or math.isnan(caa):
        return "Houses were not scored."
    if caa >= LEARNED and fcn >= LEARNED:
        return "Both learned to tell them apart."
    if caa >= LEARNED:
        return f"CAA learned to tell them apart, and FCN {'did not' if fcn <= BARELY else 'only in part'}."
    if fcn >= LEARNED:
        return f"FCN learned to tell them apart, and CAA {'did not' if caa <= BARELY else 'only in part'}."
    if max(fcn, caa) <= BARELY:
        return "Neither learned to tell them apart."
    better = "CAA" if caa > fcn else "FCN"
    if min(fcn, caa) <= BARELY:
        return f"{better} learned to tell them apart in part, and the other did not."
    return "Both learned to tell them apart in part."


def write_demo_page(
    path: Path,
    contenders: Mapping[str, Contender],
    samples: Sequence[Sample],
    *,
    reports: Mapping[str, str],
    origin: dict[str, Any],
) -> None:
    """Write the report.

    Args:
        path: the page.
        contenders: "FCN" and "CAA".
        samples: what is shown, as drawn.
        reports: where each one's own report lies, seen from the page.
        origin: hardware and versions, as `provenance` gives them.
    """
    fcn, caa = contenders["FCN"], contenders["CAA"]
    curves = [
        {
            "caption": caption,
            "svg": as_svg(
                draw_lines(
                    [line_of(one.journal, key, name, factor) for name, one in (("CAA", caa), ("FCN", fcn))],
                    from_zero=True,
                ),
                f"curve-{key}",
            ),
        }
        for caption, key, factor in (
            ("mean IoU on the validation split, %", "val_mean_iou", 100),
            ("training loss", "loss", 1),
        )
    ]
    classes = [
        {"name": name, "color": Scenes.palette[k], "fcn": fcn.evaluation.iou[k], "caa": caa.evaluation.iou[k]}
        for k, name in enumerate(Scenes.classes)
    ]
    write_page(
        path,
        "demo.html.j2",
        title="FCN and CAA on drawn scenes",
        fcn=fcn,
        caa=caa,
        finding=finding(fcn.outcome, caa.outcome),
        curves=curves,
        classes=classes,
        first_house=FIRST_HOUSE,
        absent=ABSENT,
        cases=[
            {"name": sample.name, "pictures": _pictures(sample, fcn.predictions[k], caa.predictions[k])}
            for k, sample in enumerate(samples)
        ],
        marks=[("CAA alone is right", CAA_RIGHT), ("FCN alone is right", FCN_RIGHT), ("both are wrong", BOTH_WRONG)],
        recipes={name: recipe_text(one.recipe) for name, one in contenders.items()},
        reports=reports,
        origin=origin,
    )


def _pictures(sample: Sample, fcn: Tensor, caa: Tensor) -> list[Picture]:
    image, label, palette = sample.image, sample.label, Scenes.palette
    differ = (fcn != caa) & (label != IGNORE)
    marks = [
        (differ, BOTH_WRONG),
        (differ & (caa == label), CAA_RIGHT),
        (differ & (fcn == label), FCN_RIGHT),
    ]
    return [
        picture_of_image(image),
        picture_of_labels(image, label, palette, "truth"),
        picture_of_labels(image, fcn, palette, "FCN"),
        picture_of_labels(image, caa, palette, "CAA"),
        picture_of_marks(image, marks, label, "where the two differ"),
    ]


def _mean(scores: Sequence[float]) -> float:
    kept = [score for score in scores if not math.isnan(score)]
    return sum(kept) / len(kept) if kept else math.nan
