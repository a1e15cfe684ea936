"""A model with input upsampling equals the model on larger images, with logits at the original size."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import caaseg
from caaseg.analysis.conflicts import Views
from caaseg.analysis.pixel_attention import predict_with_attention
from caaseg.models import with_output_stride
from caaseg.models.predictor import Predictor
from caaseg.models.resize import resize, upsample_input, upsampled_side
from caaseg.training.losses import CrossEntropy

SMALL: dict[str, Any] = {"backbone": "test_resnet", "channels": 8, "key_channels": 4, "gate_width": 8, "num_classes": 5}


def pair(head: str, input_upsampling: float, **options: Any) -> tuple[caaseg.Segmenter, caaseg.Segmenter]:
    """Return a model with input upsampling, and a model with the same weights without it."""
    torch.manual_seed(0)
    plain = caaseg.create_model(head, **SMALL, **options)
    plain(torch.randn(4, 3, 65, 65))  # updates the initial batch norm statistics
    model = caaseg.create_model(head, input_upsampling=input_upsampling, **SMALL, **options)
    model.load_state_dict(plain.state_dict())
    return model.eval(), plain.eval()


@pytest.mark.parametrize(
    ("side", "factor", "expected"),
    [(513, 2, 1025), (352, 2, 703), (33, 4, 129), (11, 1.3, 14), (64, 1.5, 95), (1, 4, 1), (7, 1, 7)],
)
def test_the_distance_between_pixels_is_multiplied_by_the_factor(side: int, factor: float, expected: int) -> None:
    assert upsampled_side(side, factor) == expected
    line = torch.linspace(0, 1, side).view(1, 1, 1, side)
    found = upsample_input(line, factor)
    assert found.shape == (1, 1, 1, expected)
    torch.testing.assert_close(found, torch.linspace(0, 1, expected).view(1, 1, 1, expected))


@pytest.mark.parametrize("input_upsampling", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("head", ["caa", "danet"])
def test_a_model_with_input_upsampling_equals_the_model_on_larger_images(head: str, input_upsampling: float) -> None:
    model, plain = pair(head, input_upsampling, aux=True, decoder=True)
    images = torch.randn(2, 3, 41, 34)
    larger = resize(images, [upsampled_side(side, input_upsampling) for side in (41, 34)])
    with torch.no_grad():
        found, expected = model(images), plain.coarse(larger)
    assert found.logits.shape == (2, 5, 41, 34)
    torch.testing.assert_close(found.logits, resize(expected.logits, (41, 34)))
    assert found.aux is not None
    assert expected.aux is not None
    torch.testing.assert_close(found.aux, resize(expected.aux, (41, 34)))
    for name, branch in expected.branches.items():
        torch.testing.assert_close(found.branches[name], resize(branch, (41, 34)))
    with torch.no_grad():
        assert torch.equal(found.logits, plain(images).logits) == (input_upsampling == 1)


@pytest.mark.parametrize("size", [(1, 1), (2, 50), (33, 40), (64, 65)])
def test_coarse_logits_are_at_most_as_large_as_the_images_and_the_loss_accepts_them(size: tuple[int, int]) -> None:
    model, _ = pair("fcn", 4.0, decoder=True)  # stride 4 with a factor of 4: logits as large as the images
    images, labels = torch.randn(2, 3, *size), torch.randint(5, (2, *size), dtype=torch.uint8)
    coarse = model.coarse(images).logits
    assert coarse.shape[2:] == size
    expected = cross_entropy(model(images).logits, labels.long(), reduction="sum")
    torch.testing.assert_close(CrossEntropy()(coarse, labels), expected)


def test_another_output_stride_keeps_the_input_upsampling() -> None:
    model, plain = pair("fcn", 2.0)
    images = torch.randn(1, 3, 33, 33)
    with torch.no_grad():
        expected = resize(with_output_stride(plain, 8).coarse(resize(images, (65, 65))).logits, (33, 33))
        torch.testing.assert_close(with_output_stride(model, 8)(images).logits, expected)


def test_windows_and_branches_are_upsampled() -> None:
    model, _ = pair("danet", 2.0)
    image = torch.randint(0, 256, (1, 3, 60, 80), dtype=torch.uint8)
    scores = Predictor(model, window=(32, 48)).scores(image)
    views = Predictor(Views(model), window=(32, 48)).scores(image)  # the model's own prediction comes last
    assert scores.shape == (1, 5, 60, 80)
    torch.testing.assert_close(views[:, -5:], scores)


@pytest.mark.parametrize("pixel", [(0, 0), (50, 20), (31, 77), (71, 103)])
def test_the_cell_of_a_pixel_has_its_receptive_field_around_that_pixel(pixel: tuple[int, int]) -> None:
    model, _ = pair("caa", 2.0, output_stride=8)
    image = torch.randint(0, 256, (3, 72, 104), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    attention = predict_with_attention(model, image).at(pixel)
    assert attention is not None
    assert attention.reach.shape == (18, 26)  # features of an image of 143 x 207
    images = torch.randn(1, 3, 72, 104, requires_grad=True)
    i, j = attention.cell
    (gradient,) = torch.autograd.grad(model.features(images).coarse[0, :, i, j].sum(), images)
    weight = gradient.abs().sum((0, 1))
    rows, columns = torch.meshgrid(torch.arange(72.0), torch.arange(104.0), indexing="ij")
    for position, line in zip(pixel, (rows, columns), strict=True):
        center = float((weight * line).sum() / weight.sum())
        assert abs(center - position) < 7  # receptive fields are about 60 pixels wide
