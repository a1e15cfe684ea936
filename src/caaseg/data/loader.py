"""Batches for training and for evaluation, with what is random in them fixed by the seed, the step and the place alone.

Training has no epochs: it draws from an endless order, one random permutation of the dataset after another. Sample k of
step s is number s * batch_size + k of that order, seen through an augmentation drawn from (seed, s, k). How many
workers read it, on which rank it lands and whether training was resumed in between changes nothing.

Images stay uint8 until they are on the device, a quarter of the bytes of floats; `transforms.normalize` does the rest.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from caaseg.config import Augmentation
from caaseg.data.sample import BadFileError, Batch, Sample, SegmentationDataset
from caaseg.data.transforms import draw_view, padded, write_view

logger = logging.getLogger(__name__)

T = TypeVar("T")

BadFiles = Literal["stop", "skip"]

# What a stream of random numbers is for; part of its seed, so that no two are the same.
ORDER, VIEW, REPLACEMENT = range(3)

MOST_ATTEMPTS = 100
PREFETCH = 2  # batches that each worker has in hand
WORTH_A_WORKER = 64  # samples to read once; fewer are read before a process more has started


class StepSampler(Sampler[int]):
    """Step after step, without end. `step` is the one that iterating starts with."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __iter__(self) -> Iterator[int]:
        return count(self.step)


class Slots(NamedTuple):
    """Memory for the batches in hand, shared with the workers and used again and again.

    Fresh shared memory for each batch, torch's own way, has every page of it mapped in anew on both sides, which may
    take longer than the augmentation.
    """

    images: Tensor  # (slots, N, 3, H, W) uint8
    labels: Tensor  # (slots, N, H, W) uint8

    @classmethod
    def make(cls, number: int, samples: int, size: tuple[int, int]) -> "Slots":
        slots = cls(
            torch.empty(number, samples, 3, *size, dtype=torch.uint8),
            torch.empty(number, samples, *size, dtype=torch.uint8),
        )
        for tensor in slots:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return slots


class Filled(NamedTuple):
    """What a worker hands over. Faults travel as values: an exception would arrive with a traceback for a message."""

    slot: int
    names: tuple[str, ...] | None  # None where a sample could not be read
    faults: dict[int, str]  # what was wrong with files, by index into the dataset


class TrainingBatches(Dataset[Filled]):
    """One rank's share of the batch of each step."""

    def __init__(
        self,
        dataset: SegmentationDataset,
        augmentation: Augmentation,
        *,
        batch_size: int,
        share: range,
        seed: int,
        attempts: int,
        slots: Slots,
    ) -> None:
        """Keep what decides the batches.

        Args:
            dataset: where samples come from.
            augmentation: what they go through.
            batch_size: samples in a step, all ranks together.
            share: this rank's places among them.
            seed: decides order and augmentation.
            attempts: how many samples to try, the first included, before one is given up.
            slots: where batches are put.
        """
        self.dataset = dataset
        self.augmentation = augmentation
        self.batch_size = batch_size
        self.share = share
        self.seed = seed
        self.attempts = attempts
        self.slots = slots

    def __getitem__(self, step: int) -> Filled:
        slot = step % len(self.slots.images)
        faults: dict[int, str] = {}
        names = []
        for n, k in enumerate(self.share):
            sample = self._read(step, k, faults)
            if sample is None:
                return Filled(slot, None, faults)
            view = draw_view(self.augmentation, _stream(self.seed, VIEW, step, k))
            write_view(sample, view, self.slots.images[slot, n], self.slots.labels[slot, n])
            names.append(sample.name)
        return Filled(slot, tuple(names), faults)

    def _read(self, step: int, k: int, faults: dict[int, str]) -> Sample | None:
        """The k-th sample of a step or, where that cannot be read, one drawn in its place."""
        length = len(self.dataset)
        epoch, position = divmod(step * self.batch_size + k, length)
        index = int(_order(self.seed, epoch, length)[position])
        for attempt in range(self.attempts):
            try:
                return self.dataset[index]
            except BadFileError as error:
                faults[index] = str(error)
            index = int(_stream(self.seed, REPLACEMENT, step, k, attempt).integers(length))
        return None


class TrainingLoader:
    """Batches of augmented samples, step after step, without end.

    `step` is the next step. Iterating again goes on with it, and a loader made with `step=s` goes on as one that has
    given s batches.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        augmentation: Augmentation,
        *,
        batch_size: int,
        seed: int = 0,
        step: int = 0,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
        bad_files: BadFiles = "stop",
        bad_share: float = 0.01,
    ) -> None:
        """Reads nothing yet.

        Args:
            dataset: where samples come from; a file it cannot use it reports as BadFileError.
            augmentation: what samples go through.
            batch_size: samples in a step, all ranks together.
            seed: decides order and augmentation.
            step: the step to start with, to resume.
            workers: processes that read beside this one; 0 reads in this one.
            rank: which of the ranks this is, from 0.
            ranks: how many processes train together, each on its share of every batch.
            bad_files: "stop" at the first, or "skip" each, with a warning, and take another sample in its place.
            bad_share: with "skip", the largest share of the dataset that may be bad before it stops all the same.
        """
        _check(workers, rank, ranks)
        if len(dataset) == 0:
            raise ValueError("the dataset has no samples; check its folder and its split")
        if batch_size < 1 or batch_size % ranks:
            raise ValueError(f"batch_size is {batch_size}; expected a multiple of the number of ranks, {ranks}")
        for name, value in (("seed", seed), ("step", step)):
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more")
        if bad_files not in get_args(BadFiles):
            raise ValueError(f"bad_files is {bad_files!r}; expected any of {', '.join(get_args(BadFiles))}")
        if not 0 <= bad_share <= 1:
            raise ValueError(f"bad_share is {bad_share}; expected 0 to 1")
        share = range(rank * batch_size // ranks, (rank + 1) * batch_size // ranks)
        # When a batch arrives, workers are told to fill one more: those in hand and the one that arrived never meet.
        self._slots = Slots.make(workers * PREFETCH + 1, len(share), augmentation.crop)
        batches = TrainingBatches(
            dataset,
            augmentation,
            batch_size=batch_size,
            share=share,
            seed=seed,
            attempts=1 if bad_files == "stop" else MOST_ATTEMPTS,
            slots=self._slots,
        )
        self._sampler = StepSampler(step)
        self._loader: DataLoader[Filled] = DataLoader(
            batches,
            sampler=self._sampler,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH if workers else None,
            worker_init_fn=_stand_apart,
        )
        self._length = len(dataset)
        self._bad_files = bad_files
        self._bad_share = bad_share
        self.skipped: dict[int, str] = {}
        """What was wrong with each file left out so far, by index into the dataset."""

    @property
    def step(self) -> int:
        return self._sampler.step

    def __iter__(self) -> Iterator[Batch]:
        # A GPU takes its copy without waiting from pinned memory. Filling that takes a while, in which the next step
        # can be launched.
        gpu = torch.cuda.is_available()
        copied = self._copied(iter(self._loader), Tensor.pin_memory if gpu else Tensor.clone)
        for batch in ahead(copied) if gpu else copied:
            self._sampler.step += 1
            yield batch

    def _copied(self, filled: Iterator[Filled], copied: Callable[[Tensor], Tensor]) -> Iterator[Batch]:
        """Batches in memory of their own: slots are filled again soon."""
        for slot, names, faults in filled:
            for index, fault in faults.items():
                self._report(index, fault)
            if names is None:
                raise BadFileError(f"no sample could be read in {MOST_ATTEMPTS} attempts; check the dataset")
            yield Batch(copied(self._slots.images[slot]), copied(self._slots.labels[slot]), names)

    def _report(self, index: int, fault: str) -> None:
        if self._bad_files == "stop":
            raise BadFileError(fault)
        if index in self.skipped:
            return
        self.skipped[index] = fault
        logger.warning("skipped %s", fault)
        if len(self.skipped) > self._bad_share * self._length:
            raise BadFileError(
                f"{len(self.skipped)} of {self._length} samples cannot be read, more than the share of "
                f"{self._bad_share:g} that may be skipped; the last: {fault}"
            )


def ahead(items: Iterator[T], number: int = 2) -> Iterator[T]:
    """The same items, made in a thread of their own while those before are worked on, so many ahead."""
    made: Queue[tuple[T | None, BaseException | None]] = Queue(number)
    stopped = Event()

    def hand_over(item: T | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            with suppress(Full):
                made.put((item, error), timeout=0.1)
                return

    def make() -> None:
        try:
            for item in items:
                hand_over(item, None)
                if stopped.is_set():
                    return
            hand_over(None, StopIteration())
        except BaseException as error:
            hand_over(None, error)

    Thread(target=make, daemon=True).start()
    try:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()


class EvaluationSamples(Dataset[Sample | str]):
    """The samples as they are, or padded to one size; where a file cannot be used, why not."""

    def __init__(self, dataset: SegmentationDataset, pad_to: tuple[int, int] | None) -> None:
        self.dataset = dataset
        self.pad_to = pad_to

    def __getitem__(self, index: int) -> Sample | str:
        try:
            sample = self.dataset[index]
        except BadFileError as error:
            return str(error)
        return sample if self.pad_to is None else padded(sample, self.pad_to)


class EvaluationLoader:
    """Every sample once, in order; over several ranks each has its share and none has one twice.

    Shares differ by one sample where the ranks do not divide the dataset: so may the number of batches.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        *,
        batch_size: int = 1,
        pad_to: tuple[int, int] | None = None,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Reads nothing yet.

        Args:
            dataset: where samples come from; the first that cannot be read stops the evaluation.
            batch_size: samples in a batch of this rank; above 1, images of several sizes need `pad_to`.
            pad_to: height and width that fit all images; None leaves them as they are.
            workers: processes that read beside this one; 0 reads in this one.
            rank: which of the ranks this is, from 0.
            ranks: how many processes evaluate together.
        """
        _check(workers, rank, ranks)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        share = range(rank, len(dataset), ranks)
        self._batches = [list(share[start : start + batch_size]) for start in range(0, len(share), batch_size)]
        self._loader: DataLoader[Batch | str] = DataLoader(
            EvaluationSamples(dataset, pad_to),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=_collated,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_stand_apart,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            if isinstance(batch, str):
                raise BadFileError(batch)
            yield batch


def worthwhile(workers: int, samples: int) -> int:
    """How many of the workers are worth starting to read so many samples once."""
    return min(workers, samples // WORTH_A_WORKER)


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples of one size as a batch."""
    first = samples[0]
    for sample in samples:
        if sample.label.shape != first.label.shape:
            sizes = " and ".join(f"{s.name} is {s.label.shape[0]} x {s.label.shape[1]}" for s in (first, sample))
            raise ValueError(f"{sizes}: one batch needs one size; pad to a size, or take batches of 1")
    images = torch.stack([sample.image for sample in samples])
    labels = torch.stack([sample.label for sample in samples])
    return Batch(images.contiguous(), labels, tuple(sample.name for sample in samples))


def _collated(samples: Sequence[Sample | str]) -> Batch | str:
    fault = next((sample for sample in samples if isinstance(sample, str)), None)
    return collate([sample for sample in samples if not isinstance(sample, str)]) if fault is None else fault


def _stand_apart(worker: int) -> None:
    """Leave the process group: a terminal's Ctrl-C, or a SIGTERM to the group, is for the process that is read for.

    It may finish a step, and need a batch for it, before it stops its workers itself; they end too when it is gone.
    """
    if hasattr(os, "setpgrp"):  # not on Windows
        os.setpgrp()


def _as_it_is(filled: Any) -> Any:  # torch takes it for a list of samples
    return filled


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def _order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return _stream(seed, ORDER, epoch).permutation(length)


def _stream(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *purpose))))


def _check(workers: int, rank: int, ranks: int) -> None:
    if workers < 0:
        raise ValueError(f"workers is {workers}; expected 0 or more")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks} ranks; expected 0 to {ranks - 1}")
