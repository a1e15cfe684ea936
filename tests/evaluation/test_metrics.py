"""Metrics against calculations by hand, scikit-learn, and a slow implementation of boundary IoU."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score, recall_score
from torch import Tensor

from caaseg.data.sample import IGNORE
from caaseg.evaluation.metrics import BoundaryIoU, ConfusionMatrix, close_to_contour

seeds = st.integers(0, 2**31)


def draw(seed: int, size: tuple[int, ...], num_classes: int, ignored: float) -> tuple[Tensor, Tensor]:
    """Return predictions and labels. Some labels are ignored; the last of several classes occurs in neither."""
    rng = np.random.default_rng(seed)
    most = max(1, num_classes - 1)
    labels = rng.integers(0, most, size).astype(np.uint8)
    predictions = np.where(rng.random(size) < 0.5, labels, rng.integers(0, most, size))
    labels[rng.random(size) < ignored] = IGNORE
    return torch.from_numpy(predictions), torch.from_numpy(labels)


def test_scores_of_two_classes_equal_a_calculation_by_hand() -> None:
    labels = torch.tensor([[0, 0, 0, 1], [1, 1, 255, 255]], dtype=torch.uint8)
    predictions = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]])
    matrix = ConfusionMatrix(2)
    matrix.update(predictions[:1], labels[:1])
    matrix.update(predictions[1:], labels[1:])
    assert matrix.counts.tolist() == [[2, 1], [1, 2]]
    assert matrix.iou.tolist() == [2 / 4, 2 / 4]
    assert matrix.accuracy.tolist() == [2 / 3, 2 / 3]
    assert (matrix.mean_iou, matrix.pixel_accuracy) == (0.5, 4 / 6)


def test_means_skip_classes_that_do_not_occur() -> None:
    matrix = ConfusionMatrix(4)
    matrix.update(torch.tensor([0, 0, 2]), torch.tensor([0, 0, 0], dtype=torch.uint8))
    assert matrix.iou[0] == 2 / 3
    assert matrix.iou[2] == 0  # predicted, but not labeled
    assert math.isnan(matrix.iou[1])
    assert math.isnan(matrix.accuracy[2])
    assert matrix.mean_iou == 1 / 3
    assert matrix.mean_accuracy == 2 / 3


def test_scores_without_a_labeled_pixel_are_nan() -> None:
    matrix = ConfusionMatrix(3)
    matrix.update(torch.tensor([0, 1]), torch.tensor([255, 255], dtype=torch.uint8))
    assert matrix.counts.sum() == 0
    assert all(math.isnan(score) for score in (matrix.mean_iou, matrix.mean_accuracy, matrix.pixel_accuracy))


@given(seed=seeds, pixels=st.integers(1, 60), num_classes=st.integers(2, 6), ignored=st.sampled_from([0.0, 0.3, 0.9]))
def test_every_score_equals_that_of_scikit_learn(seed: int, pixels: int, num_classes: int, ignored: float) -> None:
    predictions, labels = draw(seed, (pixels,), num_classes, ignored)
    matrix = ConfusionMatrix(num_classes)
    matrix.update(predictions, labels)
    labeled = labels != IGNORE
    if not labeled.any():
        return
    truth, found, ids = labels[labeled].numpy(), predictions[labeled].numpy(), list(range(num_classes))
    assert matrix.counts.tolist() == confusion_matrix(truth, found, labels=ids).tolist()
    iou = jaccard_score(truth, found, labels=ids, average=None, zero_division=0)
    iou[~np.isin(ids, [truth, found])] = math.nan  # where scikit-learn returns zero_division
    recall = recall_score(truth, found, labels=ids, average=None, zero_division=math.nan)
    np.testing.assert_allclose(matrix.iou.numpy(), iou, rtol=1e-12)
    np.testing.assert_allclose(matrix.accuracy.numpy(), recall, rtol=1e-12)
    assert matrix.mean_iou == pytest.approx(np.nanmean(iou), rel=1e-12)
    assert matrix.mean_accuracy == pytest.approx(np.nanmean(recall), rel=1e-12)
    assert matrix.pixel_accuracy == pytest.approx(accuracy_score(truth, found), rel=1e-12)


def slow_boundary_iou(prediction: Tensor, label: Tensor, num_classes: int, distance: int) -> list[float]:
    """Compute boundary IoU per class: masks, their pixels close to the contour, intersection over union."""
    height, width = label.shape
    truth = [
        [int(prediction[y, x] if label[y, x] == IGNORE else label[y, x]) for x in range(width)] for y in range(height)
    ]

    def inner(classes: list[list[int]], k: int) -> set[tuple[int, int]]:
        mask = {(y, x) for y in range(height) for x in range(width) if classes[y][x] == k}
        reach = range(-distance, distance + 1)
        return {(y, x) for y, x in mask if any((y + down, x + right) not in mask for down in reach for right in reach)}

    scores = []
    labeled = {(y, x) for y in range(height) for x in range(width) if label[y, x] != IGNORE}
    for k in range(num_classes):
        ours, theirs = inner(prediction.tolist(), k) & labeled, inner(truth, k) & labeled
        scores.append(len(ours & theirs) / len(ours | theirs) if ours | theirs else math.nan)
    return scores


@given(
    seed=seeds,
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    num_classes=st.integers(1, 4),
    ignored=st.sampled_from([0.0, 0.2]),
    share=st.sampled_from([0.02, 0.1, 0.2, 0.4]),
)
def test_boundary_iou_equals_its_definition(
    seed: int, height: int, width: int, num_classes: int, ignored: float, share: float
) -> None:
    predictions, labels = draw(seed, (1, (height + 3) // 4, (width + 3) // 4), num_classes, ignored)
    predictions, labels = (  # patches of 4 x 4, so that some pixels are inside
        classes.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :height, :width] for classes in (predictions, labels)
    )
    counts = BoundaryIoU(num_classes, width=share)
    counts.update(predictions, labels)
    distance = max(1, round(share * math.hypot(height, width)))
    expected = slow_boundary_iou(predictions[0], labels[0], num_classes, distance)
    np.testing.assert_allclose(counts.iou.numpy(), expected, rtol=1e-12)


def test_the_default_width_of_a_boundary_is_2_percent_of_the_diagonal() -> None:
    classes = torch.zeros(1, 300, 400, dtype=torch.int64)  # a diagonal of 500
    classes[:, :, 200:] = 1
    line = close_to_contour(classes, 10)[0, 150]
    assert line.nonzero().flatten().tolist() == [*range(10), *range(190, 210), *range(390, 400)]
    counts = BoundaryIoU(2)
    counts.update(classes, classes.to(torch.uint8))
    assert counts.counts[0].tolist() == [300 * 200 - 280 * 180] * 2
    assert counts.mean_iou == 1


def test_a_shifted_edge_costs_more_boundary_iou_than_iou() -> None:
    labels = torch.zeros(1, 100, 100, dtype=torch.uint8)
    labels[:, :, 50:] = 1
    predictions = labels.roll(2, dims=2)
    matrix, boundary = ConfusionMatrix(2), BoundaryIoU(2)
    matrix.update(predictions, labels)
    boundary.update(predictions, labels)
    assert matrix.mean_iou > 0.9
    assert boundary.mean_iou < 0.7


@pytest.mark.parametrize("kind", [ConfusionMatrix, BoundaryIoU])
def test_sums_of_counts_equal_the_counts_of_all_images(kind: type[ConfusionMatrix] | type[BoundaryIoU]) -> None:
    predictions, labels = draw(3, (6, 20, 30), 4, 0.1)
    whole, first, second = kind(4), kind(4), kind(4)
    whole.update(predictions, labels)
    for n in range(6):
        (first if n % 2 else second).update(predictions[n : n + 1], labels[n : n + 1])
    first.counts += second.counts
    assert torch.equal(first.counts, whole.counts)
    first.reduce()  # no change in one process
    assert torch.equal(first.counts, whole.counts)
