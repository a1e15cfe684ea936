"""The losses equal their definitions, which are computed pixel by pixel."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caaseg.config import LossRecipe
from caaseg.data.sample import IGNORE
from caaseg.errors import CaasegError
from caaseg.models import Prediction
from caaseg.training.losses import (
    CrossEntropy,
    Dice,
    Focal,
    Loss,
    Lovasz,
    WeightedSum,
    log_class_weights,
    make_loss,
    presence_loss,
    segmentation_loss,
)

sizes = st.integers(min_value=1, max_value=5)


def draw(seed: int, n: int, k: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, k, (n, h, w), generator=rng, dtype=torch.uint8)
    labels[torch.rand(n, h, w, generator=rng) < 0.4] = IGNORE
    return torch.randn(n, k, h, w, generator=rng), labels


def slow_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None, ohem: float | None) -> tuple[float, int]:
    """Return the summed cross entropy and the number of pixels in the sum."""
    total, pixels = 0.0, 0
    for image, label in zip(logits.double(), labels, strict=True):
        losses = []
        for y in range(label.shape[0]):
            for x in range(label.shape[1]):
                k = int(label[y, x])
                if k != IGNORE:
                    exponentials = image[:, y, x].exp()
                    loss = -math.log(float(exponentials[k] / exponentials.sum()))
                    losses.append(loss if weights is None else loss * float(weights[k]))
        used = len(losses) if ohem is None else math.ceil(ohem * len(losses))
        total += sum(sorted(losses, reverse=True)[:used])
        pixels += used
    return total, pixels


@given(
    seed=st.integers(0, 2**31),
    n=sizes,
    k=sizes,
    h=sizes,
    w=sizes,
    weighted=st.booleans(),
    ohem=st.sampled_from([None, 0.1, 0.25, 0.5, 1.0]),
)
def test_cross_entropy_equals_its_definition(
    seed: int, n: int, k: int, h: int, w: int, weighted: bool, ohem: float | None
) -> None:
    logits, labels = draw(seed, n, k, h, w)
    weights = torch.linspace(0.5, 2, k) if weighted else None
    total, pixels = slow_cross_entropy(logits, labels, weights, ohem)
    loss = CrossEntropy(weights, ohem=ohem)
    assert int(loss.count(labels)) == pixels
    # Each term and each addition has a rounding error, at most eps times the total.
    rounding = (pixels + 8) * torch.finfo(logits.dtype).eps * max(total, 1.0)
    assert float(loss(logits, labels)) == pytest.approx(total, abs=rounding)


@pytest.mark.parametrize("ohem", [None, 0.25])
def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_batch(ohem: float | None) -> None:
    logits, labels = draw(0, 6, 4, 7, 5)
    labels[2] = IGNORE  # a crop without a labeled pixel
    labels[3, 1:] = IGNORE
    loss = CrossEntropy(ohem=ohem)
    count = loss.count(labels)
    gradients = []
    values = []
    for parts in (1, 2, 6):
        leaf = logits.clone().requires_grad_()
        value = 0.0
        for part_logits, part_labels in zip(leaf.chunk(parts), labels.chunk(parts), strict=True):
            part_loss = segmentation_loss(loss, Prediction(part_logits, None, {}), part_labels, count, LossRecipe())
            part_loss.backward()  # type: ignore[no-untyped-call]
            value += part_loss.item()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        values.append(value)
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])
    assert not gradients[0][2].any()


def test_loss_and_gradient_of_a_step_without_labeled_pixels_are_zero() -> None:
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    labels = torch.full((2, 4, 4), IGNORE, dtype=torch.uint8)
    for ohem in (None, 0.5):
        cross_entropy, prediction = CrossEntropy(ohem=ohem), Prediction(logits, None, {})
        loss = segmentation_loss(cross_entropy, prediction, labels, cross_entropy.count(labels), LossRecipe())
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_loss_may_be_averaged_over_all_pixels() -> None:
    logits, labels = draw(2, 2, 3, 4, 4)
    labels[:, :2] = IGNORE
    assert int(CrossEntropy(average="all").count(labels)) == labels.numel() == 32
    assert int(CrossEntropy().count(labels)) <= 16
    assert torch.equal(CrossEntropy(average="all")(logits, labels), CrossEntropy()(logits, labels))


def test_losses_of_the_auxiliary_classifier_and_of_branches_are_weighted() -> None:
    logits, labels = draw(1, 2, 3, 4, 4)
    prediction = Prediction(logits, 2 * logits, {"spatial": 3 * logits, "channel": -logits})
    loss = CrossEntropy()
    count = loss.count(labels)

    def mean(values: Tensor) -> float:
        return float(loss(values, labels) / count)

    expected = mean(logits) + 0.4 * mean(2 * logits) + 0.7 * (mean(3 * logits) + mean(-logits))
    found = segmentation_loss(loss, prediction, labels, count, LossRecipe(aux_weight=0.4, branch_weight=0.7))
    assert float(found) == pytest.approx(expected, rel=1e-5)


@given(seed=st.integers(0, 2**31), n=sizes, k=sizes)
def test_presence_loss_equals_its_definition(seed: int, n: int, k: int) -> None:
    logits, labels = draw(seed, n, k, 2, 2)
    presence = logits[:, :, 0, 0].double()
    expected = 0.0
    for image in range(n):
        for label in range(k):
            p = 1 / (1 + math.exp(-float(presence[image, label])))
            expected -= math.log(p if label in labels[image].tolist()[0] + labels[image].tolist()[1] else 1 - p)
    found = presence_loss(presence, labels)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_presence_losses_of_micro_batches_add_up_to_the_mean_over_images_and_classes() -> None:
    logits, labels = draw(9, 6, 4, 3, 5)
    loss, recipe = CrossEntropy(), LossRecipe(presence_weight=0.7)
    count, presence = loss.count(labels), logits[:, :, 0, 0].double().requires_grad_()
    expected = 0.7 * presence_loss(presence, labels) / (6 * 4)
    (gradient,) = torch.autograd.grad(expected, presence)
    for parts in (1, 2, 6):
        total = torch.zeros((), dtype=torch.float64)
        for chosen in torch.arange(6).chunk(parts):
            plain = Prediction(torch.zeros_like(logits[chosen]), None, {})
            full = plain._replace(presence=presence[chosen])
            total += segmentation_loss(loss, full, labels[chosen], count, recipe, num_images=6)
            total -= segmentation_loss(loss, plain, labels[chosen], count, recipe)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(total, presence)[0], gradient)


def test_log_weights_are_larger_for_rare_classes_and_have_mean_1_over_the_pixels() -> None:
    counts = torch.tensor([900, 90, 10, 0])
    weights = log_class_weights(counts).double()
    frequency = counts.double() / 1000
    torch.testing.assert_close(
        weights[1:] / weights[0], math.log(1.1 + 0.9) / (1.1 + frequency[1:]).log(), rtol=1e-6, atol=0
    )
    assert float((weights * frequency).sum()) == pytest.approx(1)


def test_label_smoothing_spreads_the_target_over_all_classes() -> None:
    logits, labels = draw(3, 2, 4, 5, 6)
    weights = torch.linspace(0.5, 2, 4)
    log_p = logits.double().log_softmax(1)
    expected = 0.0
    for n, y, x in (labels != IGNORE).nonzero().tolist():
        for k in range(4):
            target = 0.9 * (k == int(labels[n, y, x])) + 0.1 / 4
            expected -= target * float(weights[k]) * float(log_p[n, k, y, x])
    assert float(CrossEntropy(weights, label_smoothing=0.1)(logits, labels)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_equals_its_definition(gamma: float) -> None:
    logits, labels = draw(4, 2, 3, 4, 5)
    weights = torch.tensor([0.5, 1.0, 3.0])
    p = logits.double().softmax(1)
    expected = 0.0
    for n, y, x in (labels != IGNORE).nonzero().tolist():
        k = int(labels[n, y, x])
        expected -= float(weights[k]) * (1 - float(p[n, k, y, x])) ** gamma * math.log(float(p[n, k, y, x]))
    loss = Focal(gamma, weights)
    assert float(loss(logits, labels)) == pytest.approx(expected, rel=1e-5)
    assert int(loss.count(labels)) == int((labels != IGNORE).sum())


def test_focal_loss_has_finite_gradients_for_confident_predictions() -> None:
    logits = torch.tensor([200.0, -200.0]).view(1, 2, 1, 1).requires_grad_()
    Focal(0.5)(logits, torch.zeros(1, 1, 1, dtype=torch.uint8)).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_dice_loss_equals_its_definition() -> None:
    logits, labels = draw(5, 3, 4, 6, 5)
    labels[2] = IGNORE
    p = logits.double().softmax(1)
    expected = 0.0
    for n in range(2):
        labeled = labels[n] != IGNORE
        classes = sorted(set(labels[n][labeled].tolist()))
        for k in classes:
            target = (labels[n] == k)[labeled].double()
            overlap, total = (p[n, k][labeled] * target).sum(), (p[n, k][labeled] + target).sum()
            expected += float(1 - 2 * overlap / total) / len(classes)
    loss = Dice()
    assert int(loss.count(labels)) == 2
    assert float(loss(logits, labels)) == pytest.approx(expected, rel=1e-5)


def slow_lovasz(errors: list[float], targets: list[bool]) -> float:
    """Return the Lovasz extension of 1 - IoU: a sum over errors, largest first, of error times growth of 1 - IoU."""
    order = sorted(range(len(errors)), key=lambda k: -errors[k])
    total, before = 0.0, 0.0
    for count in range(1, len(order) + 1):
        wrong = set(order[:count])
        intersection = sum(target and k not in wrong for k, target in enumerate(targets))
        union = sum(target or k in wrong for k, target in enumerate(targets))
        value = 1 - intersection / union
        total += errors[order[count - 1]] * (value - before)
        before = value
    return total


def test_lovasz_loss_equals_the_lovasz_extension_of_1_minus_iou() -> None:
    logits, labels = draw(6, 3, 3, 4, 4)
    labels[1] = IGNORE
    p = logits.double().softmax(1)
    expected = 0.0
    for n in (0, 2):
        labeled = labels[n] != IGNORE
        classes = sorted(set(labels[n][labeled].tolist()))
        for k in classes:
            targets = (labels[n] == k)[labeled].tolist()
            errors = (p[n, k][labeled] - torch.tensor(targets, dtype=torch.float64)).abs().tolist()
            expected += slow_lovasz(errors, targets) / len(classes)
    loss = Lovasz()
    assert int(loss.count(labels)) == 2
    assert float(loss(logits, labels)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [Dice(), Lovasz()], ids=["dice", "lovasz"])
def test_region_losses_are_near_0_for_confident_correct_predictions(loss: Loss) -> None:
    _, labels = draw(7, 2, 3, 5, 5)
    logits = 50 * F.one_hot(labels.long().clamp(max=2), 3).movedim(-1, 1).float()
    assert float(loss(logits, labels)) < 1e-5
    assert float(loss(-logits, labels)) > 1.5


def test_each_loss_of_a_recipe_is_averaged_by_its_own_count_and_weighted() -> None:
    logits, labels = draw(8, 3, 4, 5, 5)
    labels[1] = IGNORE
    recipe = LossRecipe(dice=0.5, lovasz=2.0, focal=0.3, label_smoothing=0.1)
    loss = make_loss(recipe, None)
    assert isinstance(loss, WeightedSum)
    parts: list[tuple[Loss, float]] = [
        (CrossEntropy(label_smoothing=0.1), 1.0),
        (Focal(), 0.3),
        (Dice(), 0.5),
        (Lovasz(), 2.0),
    ]
    expected = sum(weight * float(part(logits, labels) / part.count(labels)) for part, weight in parts)
    prediction = Prediction(logits, None, {})
    found = segmentation_loss(loss, prediction, labels, loss.count(labels), recipe)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    halves = [
        segmentation_loss(loss, Prediction(logits[part], None, {}), labels[part], loss.count(labels), recipe)
        for part in (slice(0, 1), slice(1, 3))
    ]
    assert float(sum(halves)) == pytest.approx(expected, rel=1e-5)
    assert isinstance(make_loss(LossRecipe(), None), CrossEntropy)
    with pytest.raises(CaasegError, match="cross_entropy is 0, and so are all other losses; expected at least one"):
        LossRecipe.read({"cross_entropy": 0})
