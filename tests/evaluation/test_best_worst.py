"""The best and worst images of a dataset."""

import pytest
import torch

from caaseg.data.sample import IGNORE, Batch
from caaseg.evaluation.best_worst import BestWorstImages
from caaseg.process_group import join_processes
from tests.processes import run_ranks


def batch_of(shares: list[float], ignored: bool = False) -> tuple[Batch, torch.Tensor]:
    """Return images of 10 x 10 pixels of class 0, and predictions with these shares of correct pixels."""
    labels = torch.full((len(shares), 10, 10), IGNORE if ignored else 0, dtype=torch.uint8)
    predictions = torch.zeros(len(shares), 10, 10, dtype=torch.int64)
    for prediction, share in zip(predictions, shares, strict=True):
        prediction.view(-1)[round(100 * share) :] = 1
    names = tuple(f"{share:.2f}" for share in shares)
    return Batch(torch.zeros(len(shares), 3, 10, 10, dtype=torch.uint8), labels, names), predictions


def test_the_best_and_worst_images_are_in_order() -> None:
    images_of = BestWorstImages(2, number=2)
    for shares in ([0.5, 0.9], [0.1, 0.3], [0.7, 0.2]):
        images_of.update(*batch_of(shares))
    assert [scored.name for scored in images_of.best] == ["0.90", "0.70"]
    assert [scored.name for scored in images_of.worst] == ["0.10", "0.20"]
    # Class 0 has an IoU of 0.9; class 1 is predicted but not labeled.
    assert images_of.best[0].mean_iou == 0.9 / 2
    assert images_of.best[0].prediction.dtype == torch.uint8
    assert int((images_of.best[0].prediction == 1).sum()) == 10


def test_no_image_is_both_best_and_worst() -> None:
    images_of = BestWorstImages(2, number=3)
    images_of.update(*batch_of([0.5, 0.9, 0.1]))
    assert [scored.name for scored in images_of.best] == ["0.90", "0.50"]
    assert [scored.name for scored in images_of.worst] == ["0.10"]


def test_an_image_without_labels_has_no_score() -> None:
    images_of = BestWorstImages(2)
    images_of.update(*batch_of([0.5], ignored=True))
    assert (images_of.images, images_of.best, images_of.worst) == (0, [], [])


def print_best_and_worst() -> None:
    with join_processes(torch.device("cpu")) as process:
        images = BestWorstImages(2, number=2)
        images.update(*batch_of([[0.5, 0.9], [0.1, 0.3, 0.7]][process.rank]))
        images.gather()
        names = [[scored.name for scored in group] for group in (images.best, images.worst)]
        print(names, images.images)


def test_images_of_two_processes_are_merged(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(print_best_and_worst) == [0, 0]
    expected = "[['0.90', '0.70'], ['0.10', '0.30']] 5"
    assert capfd.readouterr().out.splitlines() == [expected, expected]
