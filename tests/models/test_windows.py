"""Tiling in bounded memory: weights sum to one, each pixel is predicted once, windows blend by definition."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import caaseg
from caaseg.benchmarks.timing import LiveTensors
from caaseg.data.transforms import normalize
from caaseg.models.windows import Size, blend_windows, is_tiled, labels_from_parts, window_spans
from tests.small_models import pointwise_model, random_images, small_model, with_statistics

lengths = st.integers(1, 90)


def ones(images: Tensor, num_classes: int = 1) -> Tensor:
    """Predict 1 everywhere, so that the blended scores are the sums of the weights."""
    return torch.ones(len(images), num_classes, *images.shape[2:])


def assembled(predictor: caaseg.Predictor, image: Tensor, window: Size, *, shifted: bool = False) -> Tensor:
    """Assemble the parts to the scores of the whole image, and check that each pixel occurs in one part only."""
    size = (image.shape[1], image.shape[2])
    count, scores = torch.zeros(size, dtype=torch.int64), torch.empty(0)
    predictor.window = window
    for part in predictor.parts(image, shifted=shifted):
        if not len(scores):
            scores = torch.full((len(part.scores), *size), torch.nan)
        scores[:, part.rows, part.columns] = part.scores
        count[part.rows, part.columns] += 1
    assert (count == 1).all()
    return scores


@given(
    length=lengths,
    window=lengths,
    overlap=st.one_of(st.floats(0, 0.95), st.just(1 / 3)),
    shifted=st.booleans(),
)
def test_weights_along_an_axis_sum_to_one(length: int, window: int, overlap: float, shifted: bool) -> None:
    total = torch.zeros(length, dtype=torch.float64)
    for span in window_spans(length, window, overlap, shifted=shifted):
        assert len(span.weights) == min(length, window)
        assert (span.weights > 0).all()
        total[span.pixels] += span.weights
    torch.testing.assert_close(total, torch.ones(length, dtype=torch.float64), rtol=0, atol=1e-13)


def test_weights_fall_linearly_from_the_center_of_a_window_to_its_borders() -> None:
    first, second = window_spans(8, 5, 0.4)  # pixels 0 to 4 and 3 to 7
    assert first.weights.tolist() == pytest.approx([1, 1, 1, 2 / 3, 1 / 3])  # shares of 1, 2, 3, 2, 1
    assert second.weights.tolist() == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_neighboring_windows_overlap_by_at_least_the_requested_share() -> None:
    spans = window_spans(100, 30, 1 / 3)
    assert len(spans) == 5  # steps of at most 20 pixels: no more windows than the overlap needs
    starts = [span.pixels.start for span in spans]
    assert (starts[0], spans[-1].pixels.stop) == (0, 100)
    assert all(0 < after - before <= 20 for before, after in pairwise(starts))


@given(
    size=st.tuples(lengths, lengths),
    window=st.tuples(st.integers(3, 90), st.integers(3, 90)),
    overlap=st.one_of(st.floats(0, 0.8), st.just(1 / 3)),
    shifted=st.booleans(),
    batch_size=st.integers(1, 5),
)
def test_blended_weights_sum_to_one_everywhere(
    size: Size, window: Size, overlap: float, shifted: bool, batch_size: int
) -> None:
    image, total, windows = torch.zeros(3, *size), torch.full((1, *size), torch.nan), 0

    def predict(images: Tensor) -> Tensor:
        nonlocal windows
        windows += len(images)
        return ones(images)

    for part in blend_windows(predict, image, window, overlap=overlap, shifted=shifted, batch_size=batch_size):
        total[:, part.rows, part.columns] = part.scores
    # One rounding per weight and one per addition; no pixel is covered by more than all windows.
    rounding = (windows + 1) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(total, torch.ones(1, *size), rtol=0, atol=rounding)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (7, 100), (63, 65), (90, 31)])
def test_a_pointwise_model_predicts_the_same_in_windows(size: Size, shifted: bool) -> None:
    image, predictor = random_images(*size), caaseg.Predictor(pointwise_model(), flip=True)
    whole = predictor.scores(image[None])[0]
    for window in ((16, 16), (33, 17), (200, 200)):
        scores = assembled(predictor, image, window, shifted=shifted)
        torch.testing.assert_close(scores, whole, rtol=0, atol=1e-5)
        predictor.window = window
        labels = labels_from_parts(predictor.parts(image, shifted=shifted), size)
        assert torch.equal(labels, whole.argmax(0).to(torch.uint8))
        assert is_tiled(size, window) == (size[0] > window[0] or size[1] > window[1])


@pytest.mark.parametrize("size", [(1, 1), (33, 65), (50, 51)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_windows_of_an_attention_model_blend_to_the_weighted_sum(size: Size, batch_size: int) -> None:
    model, images = with_statistics(small_model(aux=True)), random_images(2, *size)
    inputs = normalize(images, model.backbone.mean, model.backbone.std)
    expected = torch.zeros(2, 5, *size)
    with torch.no_grad():
        for row in window_spans(size[0], 24, 0.5):
            for column in window_spans(size[1], 32, 0.5):
                logits = model(inputs[..., row.pixels, column.pixels]).logits
                expected[..., row.pixels, column.pixels] += (row.weights[:, None] * column.weights).float() * logits
    predictor = caaseg.Predictor(model, window=(24, 32), overlap=0.5, batch_size=batch_size)
    torch.testing.assert_close(predictor.scores(images), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(assembled(predictor, images[1], (24, 32)), expected[1], rtol=1e-5, atol=1e-5)


class BrighterThanMean(nn.Module):
    """Compare each pixel with the mean of the whole input: the result depends on where a window lies."""

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.mean(1, keepdim=True)
        return torch.cat([brightness, brightness.mean((2, 3), keepdim=True).expand_as(brightness)], dim=1)


def test_two_grids_disagree_for_a_network_with_a_large_receptive_field() -> None:
    image = random_images(60, 90, seed=3)
    image[:, :, 45:] //= 4  # darker on one side, so that windows have different means
    predictor = caaseg.Predictor(BrighterThanMean())

    def labels(window: Size, *, shifted: bool) -> Tensor:
        predictor.window = window
        return labels_from_parts(predictor.parts(image, shifted=shifted), (60, 90))

    different = labels((24, 24), shifted=False) != labels((24, 24), shifted=True)
    assert 0.001 < different.double().mean() < 0.2
    assert torch.equal(labels((99, 99), shifted=False), labels((99, 99), shifted=True))  # one window


@pytest.mark.parametrize("size", [(48, 3000), (3000, 48)])
def test_peak_memory_is_that_of_a_band_across_the_shorter_side(size: Size) -> None:
    num_classes = 50
    image = random_images(*size)
    whole = 4 * num_classes * size[0] * size[1]
    with LiveTensors([image]) as alive:
        parts = blend_windows(lambda images: ones(images, num_classes), image, (32, 32))
        pixels = sum(part.scores[0].numel() for part in parts)
    assert pixels == size[0] * size[1]
    assert alive.peak_bytes < whole / 10
