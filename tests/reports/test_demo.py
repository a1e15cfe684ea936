"""The sentences of the demo follow from its scores."""

import math

import pytest

from caaseg.reports.demo import CHANCE, DemoScores, findings


@pytest.mark.parametrize(
    ("fcn", "caa", "sentence"),
    [
        (0.12, 0.75, "CAA learned to distinguish them, and FCN did not."),
        (0.30, 0.75, "CAA learned to distinguish them, and FCN only partly."),
        (0.75, 0.12, "FCN learned to distinguish them, and CAA did not."),
        (0.75, 0.30, "FCN learned to distinguish them, and CAA only partly."),
        (0.80, 0.75, "Both learned to distinguish them."),
        (0.12, 0.13, "Neither learned to distinguish them."),
        (0.12, 0.30, "CAA partly learned to distinguish them, and FCN did not."),
        (0.30, 0.12, "FCN partly learned to distinguish them, and CAA did not."),
        (0.30, 0.40, "Both partly learned to distinguish them."),
        (math.nan, 0.40, "Houses were not scored."),
    ],
)
def test_the_sentence_on_houses_names_the_models_that_learned_them(fcn: float, caa: float, sentence: str) -> None:
    _, houses, _ = findings(DemoScores(0.5, 0.9, fcn), DemoScores(0.5, 0.9, caa))
    assert houses.endswith(f" {sentence}")


@pytest.mark.parametrize(
    ("fcn", "caa", "sentence"),
    [
        (0.480, 0.812, "CAA has 81.2 % mean IoU and FCN 48.0 %: CAA is 33.2 points ahead."),
        (0.812, 0.480, "CAA has 48.0 % mean IoU and FCN 81.2 %: FCN is 33.2 points ahead."),
        (0.480, 0.489, "CAA has 48.9 % mean IoU and FCN 48.0 %: no notable difference."),
        (math.nan, 0.4, "FCN – %: they cannot be compared."),  # noqa: RUF001
    ],
)
def test_the_sentence_on_all_classes_names_the_better_model(fcn: float, caa: float, sentence: str) -> None:
    assert findings(DemoScores(fcn, 0.9, 0.1), DemoScores(caa, 0.9, 0.1))[0].endswith(sentence)


@pytest.mark.parametrize(
    ("fcn", "caa", "sentence"),
    [
        (0.90, 0.905, "CAA has 90.5 % and FCN 90.0 %."),
        (0.95, 0.90, "CAA has 90.0 % and FCN 95.0 %: here FCN is 5.0 points ahead."),
        (0.90, 0.95, "CAA has 95.0 % and FCN 90.0 %: here CAA is 5.0 points ahead."),
    ],
)
def test_the_sentence_on_regions_and_lamps_names_the_better_model(fcn: float, caa: float, sentence: str) -> None:
    assert findings(DemoScores(0.5, fcn, 0.1), DemoScores(0.5, caa, 0.1))[2].endswith(sentence)


def test_random_colors_have_an_iou_of_one_seventh() -> None:
    assert pytest.approx(1 / 7) == CHANCE
