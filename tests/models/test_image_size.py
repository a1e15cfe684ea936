"""Sizes at which images are predicted: the same for all interfaces."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

import caaseg
from caaseg.errors import CaasegError
from caaseg.models.image_size import ShortSides, prediction_size, resize_images, resized_parts
from tests.small_models import small_model

TRAINED = ShortSides(300, 360, 400)


@pytest.mark.parametrize(
    ("size", "setting", "expected"),
    [
        ((3024, 4032), "auto", (360, 480)),
        ((4032, 3024), "auto", (480, 360)),
        ((400, 900), "auto", (400, 900)),
        ((300, 300), "auto", (300, 300)),
        ((299, 299), "auto", (360, 360)),
        ((3024, 4032), "native", (3024, 4032)),
        ((3024, 4032), 720, (720, 960)),
        ((3024, 4032), (100, 200), (100, 200)),
    ],
)
def test_images_outside_the_range_of_training_images_get_their_median_short_side(
    size: tuple[int, int], setting: object, expected: tuple[int, int]
) -> None:
    assert prediction_size(size, setting, TRAINED) == expected  # type: ignore[arg-type]


def test_models_without_training_sizes_predict_at_the_native_size() -> None:
    assert prediction_size((3024, 4032), "auto", None) == (3024, 4032)


@pytest.mark.parametrize("size", [(700, 900), (13, 17), (600, 23)])
def test_scores_resized_by_parts_equal_scores_resized_at_once(size: tuple[int, int]) -> None:
    scores = torch.randn(3, 20, 31, dtype=torch.float64)
    expected = interpolate(scores[None], size, mode="bilinear", align_corners=False)[0]
    found = torch.full((3, *size), torch.nan, dtype=torch.float64)
    for rows, columns, part in resized_parts(scores, size):
        found[:, rows, columns] = part
    torch.testing.assert_close(found, expected)


def test_the_network_sees_an_enlarged_photo_at_the_size_of_the_training_images() -> None:
    model = small_model("caa", num_classes=4).eval()
    model.config = model.config.replace(short_sides=(48, 48, 48))
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8))
    photo = small.resize((64, 48), Image.Resampling.BICUBIC)
    large = photo.resize((640, 480), Image.Resampling.BICUBIC)
    probabilities = [model.predict(image, probabilities=True).probabilities for image in (photo, large)]
    assert seen[0].shape == seen[1].shape == (1, 3, 48, 64)
    assert (seen[0] - seen[1]).abs().max() < 0.2  # standard deviations
    assert probabilities[1] is not None
    assert probabilities[1].shape == (4, 480, 640)
    assert model.predict(large, size="native").labels.shape == (480, 640)
    assert seen[2].shape == (1, 3, 480, 640)


def test_evaluation_and_prediction_use_the_same_size() -> None:
    model = small_model("fcn", num_classes=4).eval()
    model.config = model.config.replace(short_sides=(32, 32, 32))
    images = torch.randint(0, 256, (2, 3, 50, 70), dtype=torch.uint8)
    labels = caaseg.Predictor(model).labels(images)
    for image, label in zip(images, labels, strict=True):
        assert np.array_equal(model.predict(image).labels, label.numpy())
        assert np.array_equal(caaseg.Predictor(model)(image), label.numpy())
    scores = caaseg.Predictor(model).scores(images)
    assert scores.shape == (2, 4, 50, 70)
    assert scores.argmax(1).to(torch.uint8).equal(labels)


def test_images_are_resized_with_antialiasing() -> None:
    stripes = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    stripes[..., ::2] = 255
    resized = resize_images(stripes, (10, 10))
    assert (resized.float() - 127.5).abs().max() < 40  # without antialiasing it would be black or white
    assert resize_images(stripes, (40, 40)) is stripes


@pytest.mark.parametrize("size", ["large", 0, (10,), (10, 0), (1, 2, 3), 1.5])
def test_invalid_sizes_are_refused(size: object) -> None:
    with pytest.raises(CaasegError, match=r"size is .*; expected auto, native, the short side, or height"):
        caaseg.Predictor(small_model("fcn"), size=size)  # type: ignore[arg-type]
