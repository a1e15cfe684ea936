"""Pictures in windows with little memory: the same scores, each pixel once, and how much the grid matters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import caaseg
from caaseg.benchmarks.timing import LiveTensors
from caaseg.models.windows import blended_parts, grid_disagreement, is_cut, labels_of
from tests.models.test_predictor import attention_model, pictures, pointwise_model


class One(nn.Module):
    """Says 1 everywhere: blended, the sum of the weights."""

    def __init__(self, num_classes: int = 1) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, images: Tensor) -> Tensor:
        return images.new_ones(len(images), self.num_classes, *images.shape[2:])


def together(predictor: caaseg.Predictor, image: Tensor, window: tuple[int, int], **options: float) -> Tensor:
    """The parts in their places; every pixel is given once."""
    size = (image.shape[1], image.shape[2])
    given_to, scores = torch.zeros(size, dtype=torch.int64), torch.empty(0)
    for part in blended_parts(predictor, image, window, **options):  # type: ignore[arg-type]
        if not len(scores):
            scores = torch.full((len(part.scores), *size), torch.nan)
        scores[:, part.rows, part.columns] = part.scores
        given_to[part.rows, part.columns] += 1
    assert (given_to == 1).all()
    return scores


lengths = st.integers(1, 90)


@given(
    size=st.tuples(lengths, lengths),
    window=st.tuples(st.integers(3, 90), st.integers(3, 90)),
    overlap=st.one_of(st.floats(0, 0.8), st.just(1 / 3)),
    shifted=st.booleans(),
    batch_size=st.integers(1, 5),
)
def test_weights_sum_to_one_everywhere(
    size: tuple[int, int], window: tuple[int, int], overlap: float, shifted: bool, batch_size: int
) -> None:
    predictor = caaseg.Predictor(One(), batch_size=batch_size)
    total = together(predictor, pictures(*size), window, overlap=overlap, shifted=shifted)
    torch.testing.assert_close(total, torch.ones(1, *size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (7, 100), (63, 65), (90, 31)])
def test_a_pointwise_model_says_the_same_as_of_the_whole(size: tuple[int, int], shifted: bool) -> None:
    image, predictor = pictures(*size), caaseg.Predictor(pointwise_model(), flip=True)
    whole = predictor.scores(image[None])[0]
    for window in ((16, 16), (33, 17), (200, 200)):
        parts = together(predictor, image, window, shifted=shifted)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
        if is_cut(size, window):
            labels = labels_of(blended_parts(predictor, image, window), size)
            assert grid_disagreement(predictor, image, labels, window) == 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_an_attention_model_says_what_a_predictor_with_windows_does(average: str, batch_size: int) -> None:
    model, image = attention_model(), pictures(75, 110)
    options = {"flip": True, "average": average, "batch_size": batch_size}
    expected = caaseg.Predictor(model, window=(33, 49), **options).scores(image[None])[0]  # type: ignore[arg-type]
    ours = together(caaseg.Predictor(model, **options), image, (33, 49))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


class Far(nn.Module):
    """Whether a pixel is brighter than the mean of all that is seen: where a window lies decides."""

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.mean(1, keepdim=True)
        return torch.cat([brightness, brightness.mean((2, 3), keepdim=True).expand_as(brightness)], dim=1)


def test_two_grids_disagree_where_a_network_looks_far() -> None:
    image = pictures(60, 90, seed=3)
    image[:, :, 45:] //= 4  # dark on one side: windows have other means
    predictor = caaseg.Predictor(Far())
    labels = labels_of(blended_parts(predictor, image, (24, 24)), (60, 90))
    share = grid_disagreement(predictor, image, labels, (24, 24))
    again = labels_of(blended_parts(predictor, image, (24, 24), shifted=True), (60, 90))
    assert share == float((again != labels).double().mean())
    assert 0.001 < share < 0.2
    assert (
        grid_disagreement(predictor, image, labels_of(blended_parts(predictor, image, (99, 99)), (60, 90)), (99, 99))
        == 0
    )


@pytest.mark.parametrize("size", [(48, 3000), (3000, 48)])
def test_what_is_kept_is_a_band_across_the_shorter_side(size: tuple[int, int]) -> None:
    num_classes = 50
    image = pictures(*size)
    whole = 4 * num_classes * size[0] * size[1]
    predictor = caaseg.Predictor(One(num_classes), batch_size=1)
    with LiveTensors([image]) as alive:
        pixels = sum(part.scores[0].numel() for part in blended_parts(predictor, image, (32, 32)))
    assert pixels == size[0] * size[1]
    assert alive.peak_bytes < whole / 10
