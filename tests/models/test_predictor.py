"""The predictor against its definition written as a slow loop; every kind of input; every size."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate

import caaseg
from caaseg.data.transforms import normalize
from caaseg.models.predictor import Average, scaled
from caaseg.models.windows import window_spans
from tests.small_models import pointwise_model, random_images, small_model, with_statistics

SIZES = [(1, 1), (1, 40), (7, 3), (33, 65), (50, 51), (64, 48)]
SCALES = (0.5, 0.75, 1.0, 1.25)


def attention_model() -> caaseg.Segmenter:
    return with_statistics(small_model(aux=True))


class Wide(nn.Module):
    """Logits that depend on the mean of the whole input; records input shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape))
        return images + images.mean((2, 3), keepdim=True)


def normalized(model: nn.Module, images: Tensor) -> Tensor:
    if isinstance(model, caaseg.Segmenter):
        return normalize(images, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # what test_resnet is made for
    return normalize(images)


def slow_scores(model: nn.Module, images: Tensor, scales: Sequence[float], flip: bool, average: Average) -> Tensor:
    """One image, one scale and one direction at a time."""
    height, width = images.shape[2:]
    collected = []
    for scale in scales:
        size = [scaled(height, scale), scaled(width, scale)]
        for flipped in (False, True) if flip else (False,):
            view = interpolate(normalized(model, images), size, mode="bilinear", align_corners=True)
            with torch.no_grad():
                output = model(view.flip(3) if flipped else view)
            scores = output if isinstance(output, Tensor) else output.logits
            scores = scores.softmax(1) if average == "probabilities" else scores
            scores = scores.flip(3) if flipped else scores
            collected.append(interpolate(scores, (height, width), mode="bilinear", align_corners=True))
    return torch.stack(collected).mean(0)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("build", [attention_model, pointwise_model])
def test_scales_and_flip_are_the_mean_written_out(build: Callable[[], nn.Module], flip: bool, average: Average) -> None:
    model = build()
    for size in SIZES:
        images = random_images(2, *size)
        predictor = caaseg.Predictor(model, scales=SCALES, flip=flip, average=average)
        expected = slow_scores(model, images, SCALES, flip, average)
        torch.testing.assert_close(predictor.scores(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(1, 1), (5, 7), (16, 16), (33, 200), (1000, 1000)])
def test_windows_equal_the_whole_for_a_pointwise_model(window: tuple[int, int]) -> None:
    model = pointwise_model()
    for size in SIZES:
        images = random_images(1, *size)
        whole = caaseg.Predictor(model, flip=True).scores(images)
        parts = caaseg.Predictor(model, flip=True, window=window).scores(images)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("flip", [False, True])
def test_each_window_is_predicted_with_all_scales_and_flips(flip: bool) -> None:
    model, images = attention_model(), random_images(1, 50, 51)
    expected = torch.zeros(1, 5, 50, 51)
    for row in window_spans(50, 24, 1 / 3):
        for column in window_spans(51, 33, 1 / 3):
            weights = (row.weights[:, None] * column.weights).float()
            window = images[..., row.pixels, column.pixels]
            expected[..., row.pixels, column.pixels] += weights * slow_scores(model, window, SCALES, flip, "logits")
    predictor = caaseg.Predictor(model, scales=SCALES, flip=flip, window=(24, 33))
    torch.testing.assert_close(predictor.scores(images), expected, rtol=1e-5, atol=1e-5)


def test_windows_and_flips_share_a_batch() -> None:
    model = Wide()
    caaseg.Predictor(model, scales=(0.5, 1.0), flip=True).scores(random_images(1, 40, 60))
    assert model.sizes == [(2, 3, 20, 30), (2, 3, 40, 60)]  # an image and its flip

    model.sizes.clear()
    predictor = caaseg.Predictor(model, scales=(1.0, 1.5), flip=True, window=(30, 30), overlap=0, batch_size=6)
    predictor.scores(random_images(1, 60, 60))
    assert model.sizes == [(6, 3, 30, 30), (6, 3, 45, 45), (2, 3, 30, 30), (2, 3, 45, 45)]  # four windows


def test_on_a_cpu_windows_are_predicted_one_by_one() -> None:
    model = Wide()
    caaseg.Predictor(model, window=(30, 30), overlap=0).scores(random_images(1, 60, 60))
    assert model.sizes == 4 * [(1, 3, 30, 30)]


@pytest.mark.parametrize(
    ("length", "scale", "expected"),
    [
        (513, 0.5, 257),
        (513, 0.75, 385),
        (513, 1.75, 897),
        (375, 0.75, 281),
        (512, 0.75, 384),
        (1, 0.5, 1),
        (1, 1.75, 1),
        (2, 0.1, 1),
        (3, 0.25, 1),
        (97, 1.0, 97),
    ],
)
def test_a_scaled_odd_size_stays_odd(length: int, scale: float, expected: int) -> None:
    assert scaled(length, scale) == expected


def test_labels_are_uint8_of_the_size_of_the_image() -> None:
    predictor = caaseg.Predictor(attention_model(), scales=(0.75, 1.0, 1.25), flip=True)
    for size in SIZES:
        image = random_images(*size)
        labels = predictor(image.permute(1, 2, 0).numpy())
        assert labels.dtype == np.uint8
        assert labels.shape == size
        assert np.array_equal(labels, predictor.scores(image[None]).argmax(1)[0].numpy())


def test_pillow_numpy_and_files_give_the_same(tmp_path: Path) -> None:
    predictor = caaseg.Predictor(pointwise_model())
    color = random_images(9, 13).permute(1, 2, 0).numpy()
    gray = color[..., 0]
    cases: dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {
        "RGB": (color, color),
        "L": (gray, np.stack([gray] * 3, -1)),
        "RGBA": (np.dstack([color, gray]), color),  # transparency is dropped
    }
    for mode, (pixels, shown) in cases.items():
        expected = predictor.scores(torch.from_numpy(shown.copy()).permute(2, 0, 1)[None]).argmax(1)[0].numpy()
        image = Image.fromarray(pixels)
        assert image.mode == mode
        image.save(tmp_path / f"{mode}.png")
        for given_as in (pixels, image, tmp_path / f"{mode}.png", str(tmp_path / f"{mode}.png")):
            assert np.array_equal(predictor(given_as), expected), (mode, type(given_as))


def test_a_rotated_photo_is_predicted_upright(tmp_path: Path) -> None:
    predictor = caaseg.Predictor(pointwise_model())
    image = Image.fromarray(random_images(9, 13).permute(1, 2, 0).numpy())
    rotated = Image.Exif()
    rotated[0x0112] = 6  # orientation: to be rotated clockwise
    image.save(tmp_path / "photo.png", exif=rotated)
    expected = predictor(image.rotate(-90, expand=True))
    assert expected.shape == (13, 9)
    assert np.array_equal(predictor(tmp_path / "photo.png"), expected)
    with Image.open(tmp_path / "photo.png") as opened:
        assert np.array_equal(predictor(opened), expected)


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.float32), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8), np.zeros(4, np.uint8)],
)
def test_arrays_that_are_not_images_are_rejected(image: NDArray[Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"the image is an array of \w+ of shape .*; expected a path, .* a uint8 array of shape \(H, W\)",
    ):
        caaseg.Predictor(pointwise_model())(image)


def test_bf16_stays_close_and_scores_are_float32() -> None:
    model, images = attention_model(), random_images(1, 64, 64)
    exact = caaseg.Predictor(model).scores(images)
    rough = caaseg.Predictor(model, precision="bf16").scores(images)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.05 * exact.abs().max()


def test_the_mode_of_the_model_is_restored() -> None:
    model = attention_model().train()
    model.backbone.eval()  # as frozen
    modes = [module.training for module in model.modules()]
    images = random_images(1, 33, 33)
    scores = caaseg.Predictor(model).scores(images)
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(scores, caaseg.Predictor(model.eval()).scores(images))


def test_images_are_normalized_with_the_backbone_s_mean_and_std() -> None:
    model = attention_model()
    images = random_images(1, 33, 33)
    model.backbone.mean, model.backbone.std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    with torch.no_grad():
        expected = model(normalize(images, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))).logits
    torch.testing.assert_close(caaseg.Predictor(model).scores(images), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": ()}, r"scales are \(\); expected one or more factors above 0"),
        ({"scales": (1.0, -0.5)}, r"scales are \(1.0, -0.5\); expected one or more factors above 0"),
        ({"scales": (math.nan,)}, r"scales are \(nan,\)"),
        ({"window": (0, 5)}, "window is 0 x 5; expected at least 1 on each side"),
        ({"overlap": 1.0}, "overlap is 1.0; expected a share of the window"),
        ({"average": "votes"}, "average is 'votes'; expected logits or probabilities"),
        ({"precision": "8"}, "precision is '8'; expected 32 or bf16"),
        ({"batch_size": 0}, "batch_size is 0; expected 1 or more"),
    ],
)
def test_invalid_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        caaseg.Predictor(pointwise_model(), **options)


def test_images_smaller_than_the_minimum_of_the_model_are_padded_with_gray() -> None:
    model = with_statistics(small_model(min_size=(48, 40)))
    image = random_images(1, 33, 64)
    padded = torch.full((1, 3, 48, 64), 128, dtype=torch.uint8)
    padded[:, :, :33] = image
    expected = slow_scores(model, padded, (0.5, 1.0), True, "logits")[:, :, :33]
    found = caaseg.Predictor(model, scales=(0.5, 1.0), flip=True).scores(image)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
