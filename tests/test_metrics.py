"""Scores against a case worked by hand."""

import math

import torch

from caaseg.metrics import ConfusionMatrix


def test_two_classes_by_hand() -> None:
    labels = torch.tensor([[0, 0, 0, 1], [1, 1, 255, 255]], dtype=torch.uint8)
    predictions = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]])
    matrix = ConfusionMatrix(2)
    matrix.update(predictions[:1], labels[:1])
    matrix.update(predictions[1:], labels[1:])
    assert matrix.counts.tolist() == [[2, 1], [1, 2]]
    assert matrix.iou.tolist() == [2 / 4, 2 / 4]
    assert matrix.accuracy.tolist() == [2 / 3, 2 / 3]
    assert (matrix.mean_iou, matrix.pixel_accuracy) == (0.5, 4 / 6)


def test_classes_that_are_nowhere_are_left_out_of_means() -> None:
    matrix = ConfusionMatrix(4)
    matrix.update(torch.tensor([0, 0, 2]), torch.tensor([0, 0, 0], dtype=torch.uint8))
    assert matrix.iou[0] == 2 / 3
    assert matrix.iou[2] == 0  # predicted where it is not
    assert math.isnan(matrix.iou[1])
    assert math.isnan(matrix.accuracy[2])
    assert matrix.mean_iou == 1 / 3
    assert matrix.mean_accuracy == 2 / 3
