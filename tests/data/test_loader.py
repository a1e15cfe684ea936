"""Loaders: samples independent of workers and ranks, each sample evaluated once, bad files named."""

import logging
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caaseg.config import Augmentation
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.loader import EvaluationLoader, TrainingLoader, collate, prefetch
from caaseg.data.sample import BadFileError, Batch, Color, Sample
from tests.properties import examples

AUGMENTATION = Augmentation(crop=(48, 56), scale_step=None, brightness=32, contrast=0.2, saturation=0.2)

# torch warns if there are more workers than cores.
more_workers_than_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Damaged:
    """Scenes, some of them unreadable."""

    classes: tuple[str, ...] = Scenes.classes
    palette: tuple[Color, ...] = Scenes.palette

    def __init__(self, length: int, bad: set[int]) -> None:
        self.scenes = Scenes(length=length, size=(64, 64))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Sample:
        if index in self.bad:
            raise BadFileError(f"images/{index}.png: cut off; replace or remove the file")
        return self.scenes[index]


def training(**options: Any) -> TrainingLoader:
    return TrainingLoader(
        **{"dataset": Scenes(length=10, size=(64, 64)), "augmentation": AUGMENTATION, "batch_size": 4, **options}
    )


def first(loader: TrainingLoader, steps: int) -> list[Batch]:
    return list(islice(loader, steps))


def assert_same(ours: list[Batch], expected: list[Batch]) -> None:
    assert [batch.names for batch in ours] == [batch.names for batch in expected]
    for batch, other in zip(ours, expected, strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)


def concatenated(shares: list[list[Batch]]) -> list[Batch]:
    """Concatenate the batches of all ranks."""
    return [
        Batch(
            torch.cat([share.images for share in step]),
            torch.cat([share.labels for share in step]),
            tuple(name for share in step for name in share.names),
        )
        for step in zip(*shares, strict=True)
    ]


@pytest.fixture(scope="module")
def expected() -> list[Batch]:
    return first(training(seed=5), 9)


def test_batches_are_uint8_and_have_the_crop_size(expected: list[Batch]) -> None:
    for batch in expected:
        assert batch.images.shape == (4, 3, 48, 56)
        assert batch.labels.shape == (4, 48, 56)
        assert batch.images.dtype == batch.labels.dtype == torch.uint8
        assert batch.images.is_contiguous()


@more_workers_than_cores
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_samples_are_the_same_with_any_number_of_workers(workers: int, expected: list[Batch]) -> None:
    assert_same(first(training(seed=5, workers=workers), 9), expected)


@pytest.mark.slow
def test_samples_are_the_same_with_spawned_workers(expected: list[Batch]) -> None:
    # Spawned workers, the default on some systems, receive everything pickled, including the shared memory.
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert_same(first(training(seed=5, workers=2), 9), expected)
        scenes = Scenes("val", length=3, size=(64, 64))
        assert_same(list(EvaluationLoader(scenes, workers=1)), list(EvaluationLoader(scenes)))
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 7])
def test_samples_are_the_same_after_a_resume(step: int, workers: int, expected: list[Batch]) -> None:
    loader = training(seed=5, step=step, workers=workers)
    assert_same(first(loader, 9 - step), expected[step:])
    assert loader.step == 9


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_samples_are_the_same_over_several_ranks(ranks: int, workers: int, expected: list[Batch]) -> None:
    shares = [first(training(seed=5, workers=workers, rank=rank, ranks=ranks), 9) for rank in range(ranks)]
    assert_same(concatenated(shares), expected)


@more_workers_than_cores
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_iterating_again_continues_with_the_next_step(workers: int, expected: list[Batch]) -> None:
    loader = training(seed=5, workers=workers)
    batches = [batch for steps in (2, 1, 3, 0, 3) for batch in first(loader, steps)]
    assert_same(batches, expected)  # no worker has overwritten the first batches


def test_another_seed_gives_other_samples(expected: list[Batch]) -> None:
    other = first(training(seed=6), 9)
    assert [batch.names for batch in other] != [batch.names for batch in expected]


def test_one_sample_is_augmented_differently_every_time() -> None:
    batches = first(training(dataset=Scenes(length=1, size=(64, 64))), 3)
    views = {batch.images[k].numpy().tobytes() for batch in batches for k in range(4)}
    assert len(views) == 12


@examples(20)
@given(length=st.integers(1, 8), batch_size=st.integers(1, 4), seed=st.integers(0, 100))
def test_every_epoch_of_the_order_has_each_sample_once(length: int, batch_size: int, seed: int) -> None:
    loader = training(dataset=Scenes(length=length, size=(64, 64)), batch_size=batch_size, seed=seed)
    names = [name for batch in first(loader, 2 * length) for name in batch.names]
    for start in range(0, len(names) - length + 1, length):
        assert len(set(names[start : start + length])) == length


@examples(30)
@given(length=st.integers(1, 12), batch_size=st.integers(1, 6), ranks=st.integers(1, 4), padding=st.booleans())
def test_evaluation_loads_each_sample_once(length: int, batch_size: int, ranks: int, padding: bool) -> None:
    dataset = Scenes("val", length=length, size=(64, 64))
    pad_to = (66, 70) if padding else None
    loaded: Counter[str] = Counter()
    for rank in range(ranks):
        loader = EvaluationLoader(dataset, batch_size=batch_size, pad_to=pad_to, rank=rank, ranks=ranks)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(batch.labels.shape[1:] == (pad_to or (64, 64)) for batch in batches)
        loaded.update(name for batch in batches for name in batch.names)
    assert loaded == Counter({dataset[index].name: 1 for index in range(length)})


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_is_in_order_and_repeatable(workers: int) -> None:
    dataset = Scenes("val", length=5, size=(64, 64))
    loader = EvaluationLoader(dataset, batch_size=2, workers=workers)
    first_time, second_time = list(loader), list(loader)
    assert_same(second_time, first_time)
    assert torch.equal(
        torch.cat([batch.labels for batch in first_time]),
        torch.stack([s.label for s in map(dataset.__getitem__, range(5))]),
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_stops_training_and_evaluation_by_its_name(workers: int) -> None:
    message = r"^images/3\.png: cut off; replace or remove the file$"
    with pytest.raises(BadFileError, match=message):
        first(training(dataset=Damaged(6, {3}), workers=workers), 2)
    with pytest.raises(BadFileError, match=message):
        first(training(dataset=Damaged(6, {3}), on_device=True), 2)
    with pytest.raises(BadFileError, match=message):
        list(EvaluationLoader(Damaged(6, {3}), batch_size=2, workers=workers))


@more_workers_than_cores
def test_replacements_of_skipped_files_do_not_depend_on_workers_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    runs = []
    for workers in (0, 1, 4):
        caplog.clear()
        loader = training(dataset=Damaged(10, {3, 7}), workers=workers, bad_files="skip", bad_share=0.2)
        runs.append(first(loader, 9))
        assert sorted(caplog.messages) == [
            f"skipped images/{index}.png: cut off; replace or remove the file" for index in (3, 7)
        ]
        assert sorted(loader.skipped) == [3, 7]
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])
    shares = [
        first(training(dataset=Damaged(10, {3, 7}), bad_files="skip", bad_share=0.2, rank=rank, ranks=2), 9)
        for rank in (0, 1)
    ]
    assert_same(concatenated(shares), runs[0])

    # Readable samples are unchanged.
    undamaged = first(training(dataset=Damaged(10, set())), 9)
    for batch, other in zip(runs[0], undamaged, strict=True):
        for k, name in enumerate(other.names):
            replaced = name in ("train-0-000003", "train-0-000007")
            assert (batch.names[k] != name) == replaced
            assert replaced or torch.equal(batch.images[k], other.images[k])


def test_too_many_bad_files_stop_training_although_bad_files_are_skipped() -> None:
    message = (
        r"^2 of 10 samples cannot be read, more than the allowed fraction of 0\.1; "
        r"the last: images/\d\.png: cut off; replace or remove the file$"
    )
    with pytest.raises(BadFileError, match=message):
        first(training(dataset=Damaged(10, {1, 2, 3}), bad_files="skip", bad_share=0.1), 9)
    with pytest.raises(BadFileError, match=r"^no sample could be read in 100 attempts; check the dataset$"):
        first(training(dataset=Damaged(3, {0, 1, 2}), bad_files="skip", bad_share=1.0), 1)
    with pytest.raises(BadFileError, match=r"^no sample could be read in 100 attempts; check the dataset$"):
        first(training(dataset=Damaged(3, {0, 1, 2}), bad_files="skip", bad_share=1.0, on_device=True), 1)


def test_samples_of_two_sizes_cannot_be_stacked() -> None:
    samples = [Scenes(size=size, length=1)[0] for size in ((64, 64), (64, 65))]
    message = r"train-0-000000 is 64 x 64 and train-0-000000 is 64 x 65: one batch needs one size; pad the images, or"
    with pytest.raises(ValueError, match=message):
        collate(samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size is 0; expected a multiple of the number of ranks, 1"),
        ({"batch_size": 3, "ranks": 2}, r"batch_size is 3; expected a multiple of the number of ranks, 2"),
        ({"rank": 2, "ranks": 2}, r"rank is 2 of 2 ranks; expected 0 to 1"),
        ({"step": -1}, r"step is -1; expected 0 or more"),
        ({"seed": -1}, r"seed is -1; expected 0 or more"),
        ({"workers": -1}, r"workers is -1; expected 0 or more"),
        ({"bad_files": "ignore"}, r"bad_files is 'ignore'; expected any of stop, skip"),
        ({"bad_share": 1.5}, r"bad_share is 1\.5; expected 0 to 1"),
        ({"dataset": []}, r"the dataset has no samples; check its directory and its split"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size is 0; expected 1 or more"),
        ({"rank": -1}, r"rank is -1 of 1 ranks; expected 0 to 0"),
        ({"workers": -1}, r"workers is -1; expected 0 or more"),
    ],
)
def test_bad_options_of_evaluation_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationLoader(Scenes(), **options)  # type: ignore[arg-type]


def test_workers_do_not_receive_signals_of_the_terminal() -> None:
    """Ctrl-C sends a signal to a process group; the main process finishes its step, then stops its workers."""
    loader = EvaluationLoader(Scenes("val", length=3), workers=1)
    groups = {os.getpgid(worker.pid) for _ in loader for worker in multiprocessing.active_children() if worker.pid}
    assert len(groups) == 1
    assert os.getpgrp() not in groups


def test_prefetch_yields_the_same_items_and_raises_the_same_errors() -> None:
    assert list(prefetch(iter(range(50)))) == list(range(50))

    def failing() -> Iterator[int]:
        yield 1
        raise BadFileError("x.png: damaged")

    found = prefetch(failing())
    assert next(found) == 1
    with pytest.raises(BadFileError, match=r"x\.png"):
        next(found)


def test_prefetch_stops_its_thread_when_it_is_not_exhausted() -> None:
    before = set(threading.enumerate())
    endless = prefetch(count())
    assert [next(endless) for _ in range(3)] == [0, 1, 2]
    (thread,) = set(threading.enumerate()) - before
    del endless
    thread.join(timeout=5)
    assert not thread.is_alive()


def loaders(**options: Any) -> list[TrainingLoader | EvaluationLoader]:
    scenes = Scenes("val", length=3, size=(64, 64))
    return [training(**options), EvaluationLoader(scenes, **options)]


def test_nothing_is_pinned_by_default_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_memory(tensor: Tensor) -> Tensor:
        raise AssertionError("pinned")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    for loader in loaders():
        assert next(iter(loader)).images.dtype == torch.uint8


def test_pinned_batches_are_the_same(monkeypatch: pytest.MonkeyPatch, expected: list[Batch]) -> None:
    pinned: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    batches = first(training(seed=5, pin_memory=True), 3)
    assert_same(batches, expected[:3])
    assert all(any(batch.images is tensor for tensor in pinned) for batch in batches)
