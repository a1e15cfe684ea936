"""Class-aware regularization: the authors' losses and gradients, several processes, training."""

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import caaseg
from caaseg.config import Architecture, LossRecipe
from caaseg.errors import CaasegError
from caaseg.models import HEADS, Prediction
from caaseg.models.heads.base import Head, HeadFeatures
from caaseg.training.car import (
    car_losses,
    center_loss,
    class_centers,
    intra_loss,
    one_hot_labels,
    pixel_loss,
    resize_labels,
)
from caaseg.training.losses import CrossEntropy, segmentation_loss
from caaseg.training.metrics_log import read_metrics
from caaseg.training.run import train
from tests import processes
from tests.golden.networks import load
from tests.small_models import small_model
from tests.training.car_process import batch, gradients, write_gradients
from tests.training.small import small_recipe

FILES = ["car_basic", "car_shifted_labels", "car_large_label", "car_per_image_centers", "car_clipped"]


def our_labels(stored: dict[str, Any], name: str) -> Tensor:
    """Return labels (N, H, W) with classes from 0, and 255 for ignored pixels."""
    labels = torch.from_numpy(stored[name][..., 0])
    if int(stored["ignore_label"]) == 0:
        labels = torch.where(labels == 0, 256, labels) - 1
    return labels.byte()


def assert_loss(stored: dict[str, Any], name: str, loss: Tensor, leaf: Tensor, prefix: str = "") -> None:
    """Compare a loss and its gradient with the values in the golden file."""
    assert loss.item() == pytest.approx(float(stored[f"{prefix}loss_{name}"]), rel=1e-5)
    expected = torch.from_numpy(stored[f"{prefix}grad_{name}"])
    (found,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
    found = torch.zeros_like(leaf) if found is None else found
    assert float((found - expected).abs().max()) <= 5e-5 * float(expected.abs().max())


@pytest.mark.parametrize(("rows", "smaller"), [(65, 9), (64, 9), (33, 10), (50, 7), (9, 1), (1, 1), (5, 8)])
def test_labels_are_resized_to_the_nearest_pixel_with_aligned_corners(rows: int, smaller: int) -> None:
    labels = torch.arange(rows).repeat(2, 3, 1).mT.byte()  # (2, rows, 3); each row has its index as label
    step = Fraction(rows - 1, max(smaller - 1, 1))
    expected = torch.tensor([math.floor(k * step + Fraction(1, 2)) for k in range(smaller)])
    found = resize_labels(labels, torch.Size([smaller, 3]))
    assert torch.equal(found, expected.byte()[:, None].expand(2, -1, 3))
    assert torch.equal(resize_labels(labels.mT, torch.Size([3, smaller])), found.mT)


@pytest.mark.parametrize("name", FILES)
def test_losses_and_gradients_equal_those_of_the_authors(name: str) -> None:
    stored = load(name)
    classes, whole_batch = int(stored["num_class"]), bool(stored["use_batch_class_center"])
    leaf = torch.from_numpy(stored["features"]).requires_grad_()  # (N, H, W, C)
    labels = resize_labels(our_labels(stored, "label"), leaf.shape[1:3])
    assert torch.equal(labels, our_labels(stored, "label_resized"))
    pixels = leaf.flatten(1, 2)
    one_hot = one_hot_labels(labels, classes).float()
    if whole_batch:
        centers = class_centers(pixels, one_hot)
    else:
        centers = torch.cat([class_centers(pixels[k : k + 1], one_hot[k : k + 1]) for k in range(len(pixels))])
    np.testing.assert_allclose(centers.detach().numpy(), stored["centers"], rtol=1e-5, atol=1e-6)
    c2c, c2p = float(stored["threshold_c2c"]), float(stored["threshold_c2p"])
    assert_loss(stored, "intra", intra_loss(pixels, centers, one_hot), leaf)
    assert_loss(stored, "intra_remove_max", intra_loss(pixels, centers, one_hot, remove_max=True), leaf)
    assert_loss(stored, "inter_c2c", center_loss(centers, c2c), leaf)
    assert_loss(stored, "inter_c2p", pixel_loss(pixels, centers, one_hot, c2p), leaf)
    if whole_batch:
        images = leaf.permute(0, 3, 1, 2)
        losses = car_losses(images, our_labels(stored, "label"), classes, c2c_threshold=c2c, c2p_threshold=c2p)
        for key, loss in zip(("intra", "inter_c2c", "inter_c2p"), losses, strict=True):
            assert_loss(stored, key, loss, leaf)
    if "moving_center_after" in stored:
        moving = torch.from_numpy(stored["moving_center_after"])
        inter = center_loss(moving, c2c) + pixel_loss(pixels, moving, one_hot, c2p)
        assert_loss(stored, "inter_c2c_plus_c2p", inter, leaf, "moving_")
        assert_loss(stored, "intra", intra_loss(pixels, moving, one_hot), leaf, "moving_")


def test_two_processes_give_the_losses_and_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    assert processes.run_ranks(write_gradients, tmp_path) == [0, 0]
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for name, (loss, gradient) in gradients(*batch(), 1).items():
        assert loss.dtype == torch.float64
        assert gradient.abs().max() > 1e-6
        for rank in (0, 1):
            torch.testing.assert_close(found[rank][name][0], loss, rtol=1e-12, atol=0)
        together = torch.cat([found[rank][name][1] for rank in (0, 1)])
        torch.testing.assert_close(together, gradient, rtol=1e-9, atol=1e-14)


def test_bfloat16_features_are_regularized_in_float32() -> None:
    features, labels = batch()
    narrow = features.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = car_losses(narrow, labels, 5)
    for ours, expected in zip(found, car_losses(narrow.float(), labels, 5), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_has_a_linear_layer_before_its_classifier(head: str) -> None:
    model = small_model(head, car=True)
    images, labels = torch.randn(2, 3, 33, 33), torch.randint(0, 5, (2, 33, 33)).byte()
    linear = model.head.car
    assert linear is not None
    assert linear.bias is not None
    prediction = model.coarse(images)
    assert prediction.regularized is not None
    assert prediction.regularized.shape[1] == linear.out_channels
    loss, recipe = CrossEntropy(), LossRecipe(car_intra_weight=2.0, car_inter_weight=3.0)
    found = segmentation_loss(loss, prediction, labels, loss.count(labels), recipe)
    plain = segmentation_loss(loss, prediction._replace(regularized=None), labels, loss.count(labels), recipe)
    intra, c2c, c2p = car_losses(prediction.regularized, labels, 5)
    torch.testing.assert_close(found, plain + 2 * intra + 3 * (c2c + c2p))
    found.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None for weight in model.parameters())


class PlainHead(Head):
    """A head without the linear layer."""

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        self.out_channels = in_channels

    def forward(self, features: Tensor) -> HeadFeatures:
        return HeadFeatures(features, {})


def test_a_head_without_a_linear_layer_is_refused_with_car() -> None:
    small_model(PlainHead)
    with pytest.raises(CaasegError, match=r"car is true, but head .*PlainHead has no linear layer `car`; leave the"):
        small_model(PlainHead, car=True)


@pytest.mark.parametrize(("head", "width"), [("caa", 256), ("axial", 512), ("fcn", 512)])
def test_the_linear_layer_has_256_channels_for_caa_and_512_for_other_heads(head: str, width: int) -> None:
    linear = small_model(head, car=True, channels=512).head.car
    assert linear is not None
    assert linear.out_channels == width


def test_a_model_with_car_trains_and_predicts(tmp_path: Path) -> None:
    result = train(small_recipe("--model.car", "true"), tmp_path, device="cpu")
    assert result.finished
    assert all(np.isfinite(line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line)
    model = caaseg.load_model(tmp_path)
    assert isinstance(model(torch.randn(1, 3, 40, 40)), Prediction)


def test_accumulation_is_refused_with_car(tmp_path: Path) -> None:
    arguments = ["--accumulate", "2", "--batch_size", "4"]
    message = "accumulate is 2, but the class centers of model.car need the whole batch at once; use accumulate 1"
    with pytest.raises(CaasegError, match=re.escape(message)):
        train(small_recipe("--model.car", "true", *arguments), tmp_path, device="cpu")
    model = small_model(car=True, num_classes=8)
    with pytest.raises(CaasegError, match=re.escape(message)):
        train(small_recipe(*arguments), tmp_path, device="cpu", model=model)
