"""The loss against its definition, pixel by pixel."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caaseg.config import LossRecipe
from caaseg.data.sample import IGNORE
from caaseg.models import Prediction
from caaseg.training.losses import CrossEntropy, log_class_weights, segmentation_loss

sizes = st.integers(min_value=1, max_value=5)


def drawn(seed: int, n: int, k: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, k, (n, h, w), generator=rng, dtype=torch.uint8)
    labels[torch.rand(n, h, w, generator=rng) < 0.4] = IGNORE
    return torch.randn(n, k, h, w, generator=rng), labels


def written_out(logits: Tensor, labels: Tensor, weights: Tensor | None, ohem: float | None) -> tuple[float, int]:
    """The sum, and the number of pixels in it."""
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
        kept = len(losses) if ohem is None else math.ceil(ohem * len(losses))
        total += sum(sorted(losses, reverse=True)[:kept])
        pixels += kept
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
    logits, labels = drawn(seed, n, k, h, w)
    weights = torch.linspace(0.5, 2, k) if weighted else None
    total, pixels = written_out(logits, labels, weights, ohem)
    loss = CrossEntropy(weights, ohem=ohem)
    assert int(loss.count(labels)) == pixels
    assert float(loss(logits, labels)) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("ohem", [None, 0.25])
def test_parts_add_up_to_the_whole_in_value_and_gradient(ohem: float | None) -> None:
    logits, labels = drawn(0, 6, 4, 7, 5)
    labels[2] = IGNORE  # a crop without a labelled pixel
    labels[3, 1:] = IGNORE
    loss = CrossEntropy(ohem=ohem)
    count = loss.count(labels)
    gradients = []
    values = []
    for parts in (1, 2, 6):
        leaf = logits.clone().requires_grad_()
        value = 0.0
        for some, of in zip(leaf.chunk(parts), labels.chunk(parts), strict=True):
            part = segmentation_loss(loss, Prediction(some, None, {}), of, count, LossRecipe())
            part.backward()  # type: ignore[no-untyped-call]
            value += part.item()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        values.append(value)
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])
    assert not gradients[0][2].any()


def test_a_step_without_a_labelled_pixel_is_zero_and_has_zero_gradient() -> None:
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    labels = torch.full((2, 4, 4), IGNORE, dtype=torch.uint8)
    for ohem in (None, 0.5):
        cross_entropy, prediction = CrossEntropy(ohem=ohem), Prediction(logits, None, {})
        loss = segmentation_loss(cross_entropy, prediction, labels, cross_entropy.count(labels), LossRecipe())
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_aux_and_branches_are_weighted() -> None:
    logits, labels = drawn(1, 2, 3, 4, 4)
    prediction = Prediction(logits, 2 * logits, {"spatial": 3 * logits, "channel": -logits})
    loss = CrossEntropy()
    count = loss.count(labels)

    def mean(values: Tensor) -> float:
        return float(loss(values, labels) / count)

    expected = mean(logits) + 0.4 * mean(2 * logits) + 0.7 * (mean(3 * logits) + mean(-logits))
    found = segmentation_loss(loss, prediction, labels, count, LossRecipe(aux_weight=0.4, branch_weight=0.7))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_log_weights_prefer_rare_classes_and_keep_the_size_of_the_loss() -> None:
    counts = torch.tensor([900, 90, 10, 0])
    weights = log_class_weights(counts).double()
    frequency = counts.double() / 1000
    torch.testing.assert_close(
        weights[1:] / weights[0], math.log(1.1 + 0.9) / (1.1 + frequency[1:]).log(), rtol=1e-6, atol=0
    )
    assert float((weights * frequency).sum()) == pytest.approx(1)
