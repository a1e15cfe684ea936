"""Augmentation of a batch on its device equals the augmentation of its samples on a CPU."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caaseg.config import Augmentation
from caaseg.data.batch_transforms import augment_batch, plan_batch
from caaseg.data.cache import CachedDataset
from caaseg.data.loader import TrainingLoader
from caaseg.data.sample import Color, Sample
from caaseg.data.transforms import augment, draw_params

MANY: dict[str, Any] = {
    "brightness": 32,
    "contrast": 0.4,
    "saturation": 0.5,
    "hue": 0.2,
    "grayscale": 0.1,
    "blur": 0.5,
    "rotation": 30,
}


class Noise:
    """Random images of different sizes."""

    classes: tuple[str, ...] = ("a", "b", "c")
    palette: tuple[Color, ...] = ((0, 0, 0), (1, 1, 1), (2, 2, 2))

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng(index)
        size = rng.integers(1, 70, 2)
        image = torch.from_numpy(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).permute(2, 0, 1)
        return Sample(image, torch.from_numpy(rng.integers(0, 3, size, dtype=np.uint8)), str(index))


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ({}, 2),  # both passes of the filter are rounded
        ({"scale_step": None, "scales": (0.1, 5.0)}, 2),
        ({"scales": (1.0, 1.0), "rotation": 180}, 1),
        ({"scales": (1.0, 1.0), "blur": 1.0}, 1),
        ({"scales": (1.0, 1.0), "brightness": 32, "contrast": 0.4}, 1),
        ({"scales": (1.0, 1.0), "saturation": 0.5, "hue": 0.5, "grayscale": 0.2}, 1),
        ({"scale_step": None, **MANY}, 4),  # colors may multiply a difference
    ],
)
@given(seed=st.integers(0, 2**31))
def test_labels_are_identical_and_images_equal_up_to_rounding(options: dict[str, Any], levels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    augmentation = Augmentation(crop=(int(rng.integers(1, 60)), int(rng.integers(1, 60))), **options)
    samples = [Noise()[int(index)] for index in rng.integers(0, 100, 3)]
    params = [draw_params(augmentation, rng) for _ in samples]
    batch = augment_batch(plan_batch(samples, params, augmentation.crop))
    expected = [augment(sample, one, augmentation.crop) for sample, one in zip(samples, params, strict=True)]
    assert torch.equal(batch.labels, torch.stack([sample.label for sample in expected]))
    difference = batch.images.short() - torch.stack([sample.image for sample in expected]).short()
    assert difference.abs().max() <= levels
    assert batch.names == tuple(sample.name for sample in samples)


def test_flip_and_crop_without_resampling_are_exact() -> None:
    augmentation = Augmentation(crop=(30, 40), scales=(1.0, 1.0))
    rng = np.random.default_rng(0)
    samples = [Noise()[index] for index in range(8)]
    params = [draw_params(augmentation, rng) for _ in samples]
    batch = augment_batch(plan_batch(samples, params, augmentation.crop))
    assert {one.flip for one in params} == {True, False}
    for n, (sample, one) in enumerate(zip(samples, params, strict=True)):
        assert torch.equal(batch.images[n], augment(sample, one, augmentation.crop).image)


def test_the_loader_gives_the_same_samples_on_the_device_for_every_rank_and_after_a_resume() -> None:
    augmentation = Augmentation(crop=(24, 28), scale_step=None, **MANY)
    dataset = CachedDataset(Noise()).to(torch.device("cpu"))

    def batches(steps: int, *, on_device: bool = True, **options: Any) -> list[Any]:
        loader = TrainingLoader(dataset, augmentation, batch_size=4, seed=3, on_device=on_device, **options)
        return list(islice(loader, steps))

    whole = batches(4)
    for batch, expected in zip(whole, batches(4, on_device=False), strict=True):
        assert batch.names == expected.names
        assert torch.equal(batch.labels, expected.labels)
        assert (batch.images.short() - expected.images.short()).abs().max() <= 4
    for batch, expected in zip(batches(2, step=2), whole[2:], strict=True):
        assert torch.equal(batch.images, expected.images)
    shares = [batches(4, rank=rank, ranks=2) for rank in (0, 1)]
    for first, second, expected in zip(*shares, whole, strict=True):
        assert torch.equal(torch.cat([first.labels, second.labels]), expected.labels)
        assert torch.equal(torch.cat([first.images, second.images]), expected.images)


def test_the_memory_of_a_dataset_is_exact() -> None:
    samples = [Noise()[index] for index in range(5)]
    expected = sum(sample.image.nbytes + sample.label.nbytes for sample in samples)
    cached = CachedDataset(Noise())
    assert cached.nbytes == expected
    moved = cached.to(torch.device("cpu"))
    assert moved.nbytes == expected
    assert all(torch.equal(moved[index].image, sample.image) for index, sample in enumerate(samples))
