"""CachedDataset: identical samples, each file decoded once, memory shared with worker processes."""

import logging
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from caaseg.config import Augmentation
from caaseg.data.cache import CachedDataset, estimated_bytes
from caaseg.data.datasets.camvid import CamVid
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.loader import EvaluationLoader, TrainingLoader
from caaseg.data.sample import BadFileError, Color, Sample
from tests import processes
from tests.data import trees

AUGMENTATION = Augmentation(crop=(24, 32), scale_step=None, brightness=32, contrast=0.2)


class Noise:
    """Samples of many sizes, some unreadable; counts how often each index is read."""

    classes: tuple[str, ...] = Scenes.classes
    palette: tuple[Color, ...] = Scenes.palette

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length = length
        self.bad = bad
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        self.reads[index] += 1
        if index in self.bad:
            raise BadFileError(f"images/{index}.png: cut off; replace or remove the file")
        rng = torch.Generator().manual_seed(index)
        height, width = 20 + index, 30 - index
        image = torch.randint(256, (height, width, 3), generator=rng, dtype=torch.uint8).permute(2, 0, 1)
        label = torch.randint(
            8, (height, width + 5), generator=rng, dtype=torch.uint8
        )  # wider, so that the crop below is not dense
        return Sample(image, label[:, :width], f"noise {index}")


def assert_same(ours: Sample, expected: Sample) -> None:
    assert torch.equal(ours.image, expected.image)
    assert torch.equal(ours.label, expected.label)
    assert ours.name == expected.name
    assert (ours.image.dtype, ours.label.dtype) == (torch.uint8, torch.uint8)


def test_samples_are_the_same_bit_for_bit_and_read_once() -> None:
    noise = Noise(12, bad=set())
    cached = CachedDataset(noise, block_bytes=5000)  # several blocks
    assert noise.reads == dict.fromkeys(range(12), 1)
    assert len(cached) == 12
    assert (cached.classes, cached.palette) == (noise.classes, noise.palette)
    for _ in range(2):
        for index in (3, 0, 11, *range(12)):
            assert_same(cached[index], Noise(12, bad=set())[index])
            assert (
                cached[index].image.stride() == noise[index].image.stride()
            )  # memory order matters for the speed of resizing


def test_an_image_larger_than_a_block_is_cached() -> None:
    cached = CachedDataset(Noise(3, bad=set()), block_bytes=100)
    for index in range(3):
        assert_same(cached[index], Noise(3, bad=set())[index])


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_batches_are_the_same_after_the_files_are_deleted(workers: int, tmp_path: Path) -> None:
    trees.camvid(tmp_path)

    def batches(dataset: Any) -> tuple[list[Tensor], list[Tensor]]:
        training = TrainingLoader(dataset, AUGMENTATION, batch_size=4, seed=5, workers=workers)
        trained = [tensor for batch in islice(training, 6) for tensor in (batch.images, batch.labels)]
        scored = [batch.images for batch in EvaluationLoader(dataset, workers=workers)]
        return trained, scored

    dataset = CamVid(tmp_path, "train")
    expected = batches(dataset)
    cached = CachedDataset(dataset)
    shutil.rmtree(tmp_path)
    found = batches(cached)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(map(torch.equal, batches(cached)[0], expected[0]))  # augmentation did not change the cache


def write_into_received(queue: Any, sums: Tensor) -> None:
    dataset = queue.get()
    for index in range(len(dataset)):
        sums[index] = int(dataset[index].image.sum())
        dataset[index].image[0, 0, 0] = 77


def test_a_process_that_receives_the_cache_shares_its_memory() -> None:
    """Workers that are not forked, the default on some systems, receive everything pickled."""
    cached = CachedDataset(Noise(5, bad=set()))
    expected = [int(cached[index].image.sum()) for index in range(5)]
    sums = torch.zeros(5, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    queue: Any = processes.CONTEXT.SimpleQueue()
    process = processes.start(write_into_received, queue, sums)
    queue.put(cached)
    assert processes.join(process) == [0]
    assert sums.tolist() == expected
    assert [int(cached[index].image[0, 0, 0]) for index in range(5)] == [77] * 5


def test_a_bad_file_is_reported_when_its_sample_is_requested(caplog: pytest.LogCaptureFixture) -> None:
    noise = Noise(10, bad={4})
    cached = CachedDataset(noise)
    assert_same(cached[5], noise[5])
    with pytest.raises(BadFileError, match=r"^images/4\.png: cut off; replace or remove the file$"):
        cached[4]

    def skipping(dataset: Any) -> tuple[list[tuple[str, ...]], dict[int, str]]:
        loader = TrainingLoader(dataset, AUGMENTATION, batch_size=5, bad_files="skip", bad_share=0.1)
        return [batch.names for batch in islice(loader, 4)], loader.skipped

    with caplog.at_level(logging.WARNING):
        assert skipping(cached) == skipping(noise)
    assert caplog.messages == ["skipped images/4.png: cut off; replace or remove the file"] * 2
    for loader in (TrainingLoader(cached, AUGMENTATION, batch_size=10), EvaluationLoader(cached)):
        with pytest.raises(BadFileError, match=r"^images/4\.png: cut off; replace or remove the file$"):
            list(islice(loader, 10))


def test_memory_is_estimated_from_the_first_readable_sample() -> None:
    noise = Noise(9, bad={0, 1})
    assert estimated_bytes(noise) == 9 * 4 * 22 * 28
    assert noise.reads == {0: 1, 1: 1, 2: 1}
    assert estimated_bytes(Noise(2, bad={0, 1})) == 0
