"""Inference against its definition written out slowly; every kind of picture; every size."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate

import caaseg
from caaseg.data.transforms import normalize
from caaseg.models.predictor import Average, scaled, windows_of

SIZES = [(1, 1), (1, 40), (7, 3), (33, 65), (50, 51), (64, 48)]
SCALES = (0.5, 0.75, 1.0, 1.25)


def attention_model(num_classes: int = 5) -> caaseg.Segmenter:
    torch.manual_seed(0)
    small: dict[str, Any] = {"channels": 16, "key_channels": 4, "gate_width": 8}
    model = caaseg.create_model("caa", backbone="test_resnet", num_classes=num_classes, aux=True, **small)
    model(torch.randn(2, 3, 33, 33))  # batch norm statistics that are not the initial ones
    return model.eval()


def pointwise_model(num_classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, num_classes, 1)


class Wide(nn.Module):
    """Sees as far as the picture goes: the picture's mean is part of every pixel's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape))
        return images + images.mean((2, 3), keepdim=True)


def pictures(*size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (*size[:-2], 3, *size[-2:]), generator=torch.Generator().manual_seed(seed)).byte()


def normalized(model: nn.Module, images: Tensor) -> Tensor:
    if isinstance(model, caaseg.Segmenter):
        return normalize(images, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # what test_resnet is made for
    return normalize(images)


def slow_scores(model: nn.Module, images: Tensor, scales: Sequence[float], flip: bool, average: Average) -> Tensor:
    """One picture, one scale and one direction at a time."""
    height, width = images.shape[2:]
    collected = []
    for scale in scales:
        size = [scaled(height, scale), scaled(width, scale)]
        for mirrored in (False, True) if flip else (False,):
            view = interpolate(normalized(model, images), size, mode="bilinear", align_corners=True)
            with torch.no_grad():
                output = model(view.flip(3) if mirrored else view)
            scores = output if isinstance(output, Tensor) else output.logits
            scores = scores.softmax(1) if average == "probabilities" else scores
            scores = scores.flip(3) if mirrored else scores
            collected.append(interpolate(scores, (height, width), mode="bilinear", align_corners=True))
    return torch.stack(collected).mean(0)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("build", [attention_model, pointwise_model])
def test_scales_and_flip_are_the_mean_written_out(build: Callable[[], nn.Module], flip: bool, average: Average) -> None:
    model = build()
    for size in SIZES:
        images = pictures(2, *size)
        predictor = caaseg.Predictor(model, scales=SCALES, flip=flip, average=average)
        expected = slow_scores(model, images, SCALES, flip, average)
        torch.testing.assert_close(predictor.scores(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(1, 1), (5, 7), (16, 16), (33, 200), (1000, 1000)])
def test_windows_equal_the_whole_for_a_pointwise_model(window: tuple[int, int]) -> None:
    model = pointwise_model()
    for size in SIZES:
        images = pictures(1, *size)
        whole = caaseg.Predictor(model, scales=(0.75, 1.0), flip=True).scores(images)
        parts = caaseg.Predictor(model, scales=(0.75, 1.0), flip=True, window=window).scores(images)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


lengths = st.integers(1, 90)


@given(
    size=st.tuples(lengths, lengths),
    window=st.tuples(lengths, lengths),
    overlap=st.one_of(st.floats(0, 0.95), st.just(1 / 3)),
)
def test_blending_weights_sum_to_one_everywhere(size: tuple[int, int], window: tuple[int, int], overlap: float) -> None:
    total = torch.zeros(size)
    for piece in windows_of(0, size, window, overlap):
        assert piece.size == (min(size[0], window[0]), min(size[1], window[1]))
        assert (piece.weights > 0).all()
        total[piece.rows, piece.columns] += piece.weights
    torch.testing.assert_close(total, torch.ones(size), rtol=0, atol=1e-6)


def test_neighbouring_windows_overlap_by_at_least_the_share_asked_for() -> None:
    pieces = list(windows_of(0, (40, 100), (40, 30), 1 / 3))
    lefts = [piece.columns.start for piece in pieces]
    assert (lefts[0], pieces[-1].columns.stop) == (0, 100)
    assert all(0 < after - before <= 20 for before, after in pairwise(lefts))


@pytest.mark.parametrize("size", SIZES)
def test_windows_of_an_attention_model_blend_to_the_written_out_mean(size: tuple[int, int]) -> None:
    model, images = attention_model(), pictures(1, *size)
    expected = torch.zeros(1, 5, *size)
    with torch.no_grad():
        for piece in windows_of(0, size, (24, 32), 0.5):
            part = model(normalized(model, images)[..., piece.rows, piece.columns]).logits
            expected[..., piece.rows, piece.columns] += piece.weights * part
    ours = caaseg.Predictor(model, window=(24, 32), overlap=0.5).scores(images)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_pieces_of_one_size_are_batched_whatever_their_scale() -> None:
    model = Wide()
    caaseg.Predictor(model, scales=(0.5, 1.0), flip=True).scores(pictures(1, 40, 60))
    assert model.sizes == [(2, 3, 20, 30), (2, 3, 40, 60)]  # a picture and its mirror image

    model.sizes.clear()
    caaseg.Predictor(model, scales=(1.0, 1.5, 2.0), flip=True, window=(30, 30), overlap=0).scores(pictures(1, 30, 30))
    assert model.sizes == [(8, 3, 30, 30), (8, 3, 30, 30), (2, 3, 30, 30)]  # 1 + 4 + 4 windows of three scales


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


def test_labels_are_uint8_of_the_size_of_the_picture() -> None:
    predictor = caaseg.Predictor(attention_model(), scales=(0.75, 1.0, 1.25), flip=True)
    for size in SIZES:
        image = pictures(*size)
        labels = predictor(image.permute(1, 2, 0).numpy())
        assert labels.dtype == np.uint8
        assert labels.shape == size
        assert np.array_equal(labels, predictor.scores(image[None]).argmax(1)[0].numpy())


def test_pillow_numpy_and_files_give_the_same(tmp_path: Path) -> None:
    predictor = caaseg.Predictor(pointwise_model())
    color = pictures(9, 13).permute(1, 2, 0).numpy()
    grey = color[..., 0]
    cases: dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {
        "RGB": (color, color),
        "L": (grey, np.stack([grey] * 3, -1)),
        "RGBA": (np.dstack([color, grey]), color),  # transparency is dropped
    }
    for mode, (pixels, shown) in cases.items():
        expected = predictor.scores(torch.from_numpy(shown.copy()).permute(2, 0, 1)[None]).argmax(1)[0].numpy()
        picture = Image.fromarray(pixels)
        assert picture.mode == mode
        picture.save(tmp_path / f"{mode}.png")
        for given_as in (pixels, picture, tmp_path / f"{mode}.png", str(tmp_path / f"{mode}.png")):
            assert np.array_equal(predictor(given_as), expected), (mode, type(given_as))


def test_a_rotated_photo_is_seen_upright(tmp_path: Path) -> None:
    predictor = caaseg.Predictor(pointwise_model())
    picture = Image.fromarray(pictures(9, 13).permute(1, 2, 0).numpy())
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation: to be turned clockwise
    picture.save(tmp_path / "photo.png", exif=turned)
    expected = predictor(picture.rotate(-90, expand=True))
    assert expected.shape == (13, 9)
    assert np.array_equal(predictor(tmp_path / "photo.png"), expected)
    with Image.open(tmp_path / "photo.png") as opened:
        assert np.array_equal(predictor(opened), expected)


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.float32), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8), np.zeros(4, np.uint8)],
)
def test_arrays_that_are_no_pictures_are_refused(image: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"the image is an array of \w+ of shape .*; expected uint8 of shape \(H, W\)"):
        caaseg.Predictor(pointwise_model())(image)


def test_bf16_stays_close_and_scores_are_float32() -> None:
    model, images = attention_model(), pictures(1, 64, 64)
    exact = caaseg.Predictor(model).scores(images)
    rough = caaseg.Predictor(model, precision="bf16").scores(images)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_model_is_left_in_the_mode_it_was_in() -> None:
    model = attention_model().train()
    model.backbone.eval()  # as frozen
    modes = [module.training for module in model.modules()]
    images = pictures(1, 33, 33)
    scores = caaseg.Predictor(model).scores(images)
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(scores, caaseg.Predictor(model.eval()).scores(images))


def test_pictures_are_normalized_as_the_backbone_wants() -> None:
    model = attention_model()
    images = pictures(1, 33, 33)
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
def test_impossible_settings_are_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        caaseg.Predictor(pointwise_model(), **options)
