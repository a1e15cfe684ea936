"""Transforms agree with their definition: scale the whole image, then crop."""

from math import floor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caaseg.config import Augmentation
from caaseg.data.sample import IGNORE, Sample
from caaseg.data.transforms import GRAY, UNIT, AugmentationParams, augment, draw_params, normalize, pad

seeds = st.integers(0, 2**31)
lengths = st.integers(1, 40)
scales = st.one_of(st.sampled_from([512, 768, 1024, 1280, 1536, 1792, 2048]), st.integers(512, 2048))
positions = st.floats(0, 1, exclude_max=True)

PLAIN = AugmentationParams(scale=UNIT, down=0.0, right=0.0, flip=False, brightness=0.0, contrast=1.0, saturation=1.0)


def noise(height: int, width: int, seed: int) -> Sample:
    rng = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (height, width, 3), generator=rng, dtype=torch.uint8)  # as decoders write it
    label = torch.randint(0, 20, (height, width), generator=rng, dtype=torch.uint8)
    return Sample(image.permute(2, 0, 1), label, "noise")


def axis_window(length: int, crop: int, scale: int, position: float) -> tuple[int, int, int, float]:
    """Return the start of the crop in the source, the start of the source in the crop, its length, and the scale.

    If scaling adds less than one pixel to the source window, the axis is not scaled.
    """
    scaled = floor(length * scale / UNIT)
    window = length if scaled <= crop else int(np.ceil(crop * UNIT / scale))
    exact = 1.0 if floor(window * scale / UNIT) == window else scale / UNIT
    if scaled <= crop:
        return 0, floor(position * (crop - scaled + 1)), scaled, exact
    return floor(position * (length - window + 1)), 0, crop, exact


def filtering(length: int, start: int, out: int, scale: float) -> NDArray[np.float64]:
    """Return the antialiased bilinear weights, (out, length), of the source pixels for each output pixel."""
    support = max(1.0, 1 / scale)
    centers = start + (np.arange(out) + 0.5) / scale
    weights = np.maximum(0, 1 - abs(np.arange(length) + 0.5 - centers[:, None]) / support)
    return np.asarray(weights / weights.sum(1, keepdims=True))


@given(
    height=lengths,
    width=lengths,
    crop=st.tuples(lengths, lengths),
    scale=scales,
    down=positions,
    right=positions,
    seed=seeds,
)
def test_augmentation_equals_scaling_the_image_and_then_cropping_it(
    height: int, width: int, crop: tuple[int, int], scale: int, down: float, right: float, seed: int
) -> None:
    sample = noise(height, width, seed)
    image, label, name = augment(sample, PLAIN._replace(scale=scale, down=down, right=right), crop)
    assert image.shape == (3, *crop)
    assert label.shape == crop
    assert name == "noise"

    scale = max(scale, int(np.ceil(UNIT / min(height, width))))  # at least one pixel remains
    (top, top_padding, rows, down_scale), (left, left_padding, columns, right_scale) = (
        axis_window(length, size, scale, position)
        for length, size, position in ((height, crop[0], down), (width, crop[1], right))
    )
    shown = (slice(top_padding, top_padding + rows), slice(left_padding, left_padding + columns))

    vertical = filtering(height, top, rows, down_scale)
    horizontal = filtering(width, left, columns, right_scale)
    expected = vertical @ sample.image.numpy().astype(np.float64) @ horizontal.T  # (3, rows, columns)
    difference = abs(image.numpy()[:, shown[0], shown[1]] - expected)
    inner = (slice(top > 0, rows - (rows == crop[0])), slice(left > 0, columns - (columns == crop[1])))
    assert difference[:, inner[0], inner[1]].max(initial=0) < 1.6  # two passes, each rounded, with 16-bit weights

    for i in range(rows):
        for j in range(columns):
            source = sample.label[floor(top + (i + 0.5) / down_scale), floor(left + (j + 0.5) / right_scale)]
            assert label[top_padding + i, left_padding + j] == source

    beyond = torch.ones(crop, dtype=torch.bool)
    beyond[shown] = False
    assert (image[:, beyond] == GRAY).all()
    assert (label[beyond] == IGNORE).all()


@pytest.mark.parametrize("scale", [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0])
def test_crops_at_integer_positions_of_the_scaled_image_are_exact(scale: float) -> None:
    sample = noise(96, 120, seed=1)
    scaled = F.interpolate(sample.image[None], scale_factor=scale, mode="bilinear", antialias=True)[0]
    start, crop = 16, (28, 35)  # source pixel 16 has an integer position at all these scales
    window = [int(np.ceil(side / scale)) for side in crop]
    down, right = ((start + 0.5) / (side - size + 1) for side, size in zip((96, 120), window, strict=True))
    image = augment(sample, PLAIN._replace(scale=int(scale * UNIT), down=down, right=right), crop).image
    first = int(start * scale)
    expected = scaled[:, first : first + crop[0], first : first + crop[1]]
    assert torch.equal(image[:, 1:-1, 1:-1], expected[:, 1:-1, 1:-1])


@given(height=lengths, width=lengths, crop=st.tuples(lengths, lengths), scale=scales, seed=seeds)
def test_flip_reverses_the_columns_of_image_and_label(
    height: int, width: int, crop: tuple[int, int], scale: int, seed: int
) -> None:
    params = PLAIN._replace(scale=scale, down=0.3, right=0.8)
    plain = augment(noise(height, width, seed), params, crop)
    flipped = augment(noise(height, width, seed), params._replace(flip=True), crop)
    assert torch.equal(flipped.image, plain.image.flip(2))
    assert torch.equal(flipped.label, plain.label.flip(1))


@given(
    brightness=st.floats(-255, 255),
    contrast=st.floats(0, 2),
    saturation=st.one_of(st.just(1.0), st.floats(0, 2)),  # saturation 1 uses the lookup table
    seed=seeds,
)
def test_colors_change_as_defined_and_padding_and_label_do_not(
    brightness: float, contrast: float, saturation: float, seed: int
) -> None:
    sample, crop = noise(5, 6, seed), (7, 6)
    params = PLAIN._replace(brightness=brightness, contrast=contrast, saturation=saturation)
    image, label, _ = augment(sample, params, crop)
    before = sample.image.double()
    luma = (before * torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64).view(3, 1, 1)).sum(0)
    expected = luma + saturation * (before - luma)
    expected = 128 + contrast * (expected - 128) + brightness
    torch.testing.assert_close(image[:, :5].double(), expected.clamp(0, 255), rtol=0, atol=0.51)
    assert (image[:, 5:] == GRAY).all()
    assert torch.equal(label, augment(sample, PLAIN, crop).label)


@given(
    scale=scales, flip=st.booleans(), brightness=st.sampled_from([0.0, 20.0]), saturation=st.sampled_from([1.0, 0.5])
)
def test_augmentation_does_not_change_its_source(scale: int, flip: bool, brightness: float, saturation: float) -> None:
    """Cached samples are augmented repeatedly."""
    params = PLAIN._replace(scale=scale, flip=flip, brightness=brightness, saturation=saturation)
    for crop in ((20, 25), (30, 20), (70, 70)):  # equal to the image, across its edge, around it
        sample = noise(20, 25, seed=3)
        result = augment(sample, params, crop)
        result.image.zero_()
        result.label.zero_()
        unchanged = noise(20, 25, seed=3)
        assert torch.equal(sample.image, unchanged.image)
        assert torch.equal(sample.label, unchanged.label)


def test_random_parameters_follow_the_settings() -> None:
    def draws(**options: Any) -> list[AugmentationParams]:
        augmentation = Augmentation(crop=(8, 8), **options)
        return [draw_params(augmentation, np.random.default_rng(seed)) for seed in range(2000)]

    stepped = draws()
    counts = {scale: sum(params.scale == scale for params in stepped) for scale in {params.scale for params in stepped}}
    assert sorted(counts) == [512, 768, 1024, 1280, 1536, 1792, 2048]
    assert min(counts.values()) > 200  # 286 expected
    assert 900 < sum(params.flip for params in stepped) < 1100
    assert {(params.brightness, params.contrast, params.saturation) for params in stepped} == {(0, 1, 1)}

    free = [params.scale / UNIT for params in draws(scale_step=None)]
    assert 0.5 <= min(free) < 0.51
    assert 1.99 < max(free) <= 2.0
    assert abs(np.mean(free) - 1.25) < 0.03

    colored = draws(flip=0.0, brightness=32, contrast=0.4, saturation=0.2)
    assert [params.scale for params in colored] == [
        params.scale for params in stepped
    ]  # an option does not change the others
    assert not any(params.flip for params in colored)
    shifts = [params.brightness for params in colored if params.brightness]
    assert 900 < len(shifts) < 1100
    assert -32 <= min(shifts) < -31
    assert 31 < max(shifts) <= 32
    assert 0.6 <= min(params.contrast for params in colored) < 0.61
    assert 1.19 < max(params.saturation for params in colored) <= 1.2

    changed = draws(hue=0.1, grayscale=0.25, blur=0.25, rotation=20)
    old = [params[:6] for params in stepped]
    assert [params[:6] for params in changed] == old
    assert {(params.hue, params.blur, params.rotation) for params in stepped} == {(0, 0, 0)}
    assert 400 < sum(params.saturation == 0 for params in changed) < 600
    assert 400 < sum(params.blur > 0 for params in changed) < 600
    assert 1.9 < max(params.blur for params in changed) <= 2
    assert -0.1 <= min(params.hue for params in changed) < -0.09
    assert 19 < max(params.rotation for params in changed) <= 20


def test_random_parameters_of_a_seed_do_not_change_between_versions() -> None:
    """If they did, a run that was started with an earlier version would resume with other samples."""
    augmentation = Augmentation(crop=(8, 8), brightness=32, contrast=0.4, saturation=0.2)
    scale, down, right, flip, bright, brightness, contrast, saturation = np.random.default_rng(5).random(8)
    params = draw_params(augmentation, np.random.default_rng(5))
    assert (params.down, params.right, params.flip) == (down, right, flip < 0.5)
    assert params.scale == 512 + 256 * int(7 * scale)
    assert params.brightness == (32 * (2 * brightness - 1) if bright < 0.5 else 0)
    assert (params.contrast, params.saturation) == (1 + 0.4 * (2 * contrast - 1), 1 + 0.2 * (2 * saturation - 1))


def test_a_quarter_turn_rotates_image_and_label_counterclockwise() -> None:
    sample = noise(8, 8, seed=0)
    image, label, _ = augment(sample, PLAIN._replace(rotation=90.0), (8, 8))
    assert torch.equal(image, sample.image.rot90(dims=(1, 2)))
    assert torch.equal(label, sample.label.rot90())


def test_corners_of_a_rotated_image_are_ignored_and_have_its_mean_color() -> None:
    image = torch.tensor([200, 100, 40], dtype=torch.uint8).view(3, 1, 1).repeat(1, 31, 31)
    image[:, 15] = 0  # a line through the center
    label = (image[0] == 0).to(torch.uint8)
    turned = augment(Sample(image, label, "line"), PLAIN._replace(rotation=45.0), (31, 31))
    assert turned.label[0, 0] == turned.label[30, 0] == IGNORE
    assert turned.image[:, 0, 0].tolist() == [194, 97, 39]  # 30 / 31 of the color
    on_line = turned.label == 1
    assert on_line[20, 10]  # counterclockwise: from the left bottom to the right top
    assert not on_line[10, 10]
    assert (turned.image[0][on_line] < 160).all()


def test_blur_keeps_the_mean_and_smooths_the_image_but_not_the_label() -> None:
    sample = noise(40, 40, seed=1)
    blurred = augment(sample, PLAIN._replace(blur=2.0), (40, 40))
    assert blurred.image.float().std() < 0.3 * sample.image.float().std()
    assert abs(blurred.image.float().mean() - sample.image.float().mean()) < 2
    assert torch.equal(blurred.label, sample.label)


def test_hue_rotates_colors_around_gray_and_grayscale_removes_them() -> None:
    colors = torch.tensor([[150, 100, 100], [100, 100, 100], [90, 120, 140]], dtype=torch.uint8).T.reshape(3, 1, 3)
    sample = Sample(colors, torch.zeros(1, 3, dtype=torch.uint8), "colors")
    turned = augment(sample, PLAIN._replace(hue=1 / 3), (1, 3)).image[:, 0].T.tolist()
    back = sample
    for _ in range(3):
        back = augment(back, PLAIN._replace(hue=1 / 3), (1, 3))  # three thirds of the circle
    gray = augment(sample, PLAIN._replace(saturation=0.0), (1, 3)).image
    assert turned[1] == [100, 100, 100]
    red, green, blue = turned[0]
    assert max(green, blue) > red  # red becomes another color of the same luma
    assert 0.299 * red + 0.587 * green + 0.114 * blue == pytest.approx(114.95, abs=1)
    torch.testing.assert_close(back.image, colors, rtol=0, atol=2)
    assert torch.equal(gray[0], gray[1])
    assert torch.equal(gray[0], gray[2])


def test_an_augmented_sample_depends_only_on_its_generator() -> None:
    sample, augmentation = noise(40, 50, seed=0), Augmentation(crop=(32, 32), brightness=32)
    first, again, other = (
        augment(sample, draw_params(augmentation, np.random.default_rng(seed)), augmentation.crop) for seed in (1, 1, 2)
    )
    assert torch.equal(first.image, again.image)
    assert torch.equal(first.label, again.label)
    assert not torch.equal(first.image, other.image)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": (0, 5)}, r"crop is \(0, 5\); expected greater than or equal to 1"),
        ({"scales": (2.0, 0.5)}, r"scales is \(2\.0, 0\.5\); expected the smallest, then the largest, from 1/16"),
        ({"scales": (0.0, 1.0)}, r"scales is \(0\.0, 1\.0\)"),
        ({"scale_step": 0.0}, r"scale_step is 0\.0; expected greater than or equal to 0\.0009765625"),
        ({"flip": 1.5}, r"flip is 1\.5; expected less than or equal to 1"),
        ({"brightness": -1.0}, r"brightness is -1\.0; expected greater than or equal to 0"),
        ({"contrast": 2.0}, r"contrast is 2\.0; expected less than or equal to 1"),
        ({"saturation": float("nan")}, r"saturation is nan; expected a finite number"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation.read({"crop": (8, 8), **options})


def test_padding_keeps_the_image_and_ignores_the_rest() -> None:
    sample = noise(3, 4, seed=0)
    image, label, _ = pad(sample, (5, 4))
    assert torch.equal(image[:, :3], sample.image)
    assert torch.equal(label[:3], sample.label)
    assert (image[:, 3:] == GRAY).all()
    assert (label[3:] == IGNORE).all()
    with pytest.raises(ValueError, match=r"noise: 3 x 4 does not fit in 5 x 3; pad to the size of the largest image"):
        pad(sample, (5, 3))


def test_normalization_uses_the_mean_and_std_of_imagenet() -> None:
    images = torch.stack([noise(3, 4, seed).image for seed in (0, 1)])
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(3, 1, 1)
        for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    normalized = normalize(images)
    assert normalized.dtype == torch.float32
    torch.testing.assert_close(normalized.double(), (images.double() / 255 - mean) / std, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"images are torch.float32; expected uint8"):
        normalize(normalized)
