"""Loaders for training and evaluation. All randomness depends on the seed, the step and the position in the batch.

Training has no epochs: it draws from an endless order, one random permutation of the dataset after another. Sample k of
step s is number s * batch_size + k of that order, augmented with random numbers from (seed, s, k). The number of
workers, the number of ranks and resuming do not change it.

Images stay uint8, a quarter of the bytes of float32, until `transforms.normalize` converts them on the device.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
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
from caaseg.data.batch_transforms import BatchPlan, augment_batch, plan_batch
from caaseg.data.sample import BadFileError, Batch, Sample, SegmentationDataset
from caaseg.data.transforms import AugmentationParams, augment_into, draw_params, pad
from caaseg.errors import CaasegError

logger = logging.getLogger(__name__)

T = TypeVar("T")

BadFiles = Literal["stop", "skip"]

# Purpose of a random stream; part of its seed, so that streams are independent.
ORDER, AUGMENTATION, REPLACEMENT = range(3)

MAX_ATTEMPTS = 100
PREFETCH = 2  # batches in progress per worker
SAMPLES_PER_WORKER = 64  # starting a worker for fewer samples takes longer than reading them


class StepSampler(Sampler[int]):
    """Yield step numbers without end, starting at `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __iter__(self) -> Iterator[int]:
        return count(self.step)


class BatchBuffers(NamedTuple):
    """Shared memory for the batches in progress, reused from step to step.

    torch allocates new shared memory for each batch. Mapping its pages in both processes may take longer than the
    augmentation.
    """

    images: Tensor  # (buffers, N, 3, H, W) uint8
    labels: Tensor  # (buffers, N, H, W) uint8

    @classmethod
    def allocate(cls, number: int, batch_size: int, size: tuple[int, int]) -> "BatchBuffers":
        buffers = cls(
            torch.empty(number, batch_size, 3, *size, dtype=torch.uint8),
            torch.empty(number, batch_size, *size, dtype=torch.uint8),
        )
        for tensor in buffers:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return buffers


class FilledBuffer(NamedTuple):
    """Result of a worker. Errors are values: an exception from a worker would have a traceback in its message."""

    buffer: int  # index into the buffers
    names: tuple[str, ...] | None  # None if no sample could be read
    errors: dict[int, str]  # error message of bad files by dataset index


@dataclass(frozen=True)
class TrainingBatches(Dataset[FilledBuffer]):
    """The part of each step's batch that belongs to one rank."""

    dataset: SegmentationDataset
    augmentation: Augmentation
    batch_size: int  # samples per step over all ranks
    positions: range  # positions of this rank in the batch
    seed: int
    attempts: int  # samples to try before giving up, including the first
    buffers: BatchBuffers

    def __getitem__(self, step: int) -> FilledBuffer:
        buffer = step % len(self.buffers.images)
        errors: dict[int, str] = {}
        names = []
        for n, drawn in enumerate(self.draw(step, errors)):
            if drawn is None:
                return FilledBuffer(buffer, None, errors)
            sample, params = drawn
            augment_into(sample, params, self.buffers.images[buffer, n], self.buffers.labels[buffer, n])
            names.append(sample.name)
        return FilledBuffer(buffer, tuple(names), errors)

    def draw(self, step: int, errors: dict[int, str]) -> Iterator[tuple[Sample, AugmentationParams] | None]:
        """Yield the samples of a step and their random parameters; None for a sample that cannot be read.

        Args:
            step: number of the step.
            errors: gets the error message of bad files by dataset index.
        """
        for k in self.positions:
            sample = self._read(step, k, errors)
            if sample is None:
                yield None
            else:
                yield sample, draw_params(self.augmentation, _random_stream(self.seed, AUGMENTATION, step, k))

    def _read(self, step: int, k: int, errors: dict[int, str]) -> Sample | None:
        """Read sample k of a step, or a random replacement if it cannot be read."""
        length = len(self.dataset)
        epoch, position = divmod(step * self.batch_size + k, length)
        index = int(_order(self.seed, epoch, length)[position])
        for attempt in range(self.attempts):
            try:
                return self.dataset[index]
            except BadFileError as error:
                errors[index] = str(error)
            index = int(_random_stream(self.seed, REPLACEMENT, step, k, attempt).integers(length))
        return None


class TrainingLoader:
    """Endless loader of augmented batches.

    `step` is the next step. Iterating again continues with it, and a loader created with `step=s` continues like a
    loader that has already yielded s batches.

    Args:
        dataset: source of samples; it raises BadFileError for files that cannot be used.
        augmentation: random scale, crop, flip and color.
        batch_size: samples per step over all ranks.
        seed: determines order and augmentation.
        step: first step, for resuming.
        workers: worker processes; 0 reads in this process.
        rank: index of this process, from 0.
        ranks: number of processes that train together, each on its part of every batch.
        bad_files: "stop" raises BadFileError at the first bad file; "skip" logs a warning and uses another sample.
        bad_share: with "skip", largest fraction of bad samples, but at least one sample, before training stops anyway.
        pin_memory: return batches in pinned memory, prepared in a thread; use it if they are copied to a GPU.
        on_device: augment on the device of the dataset's samples, without workers, and return batches there.
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
        pin_memory: bool = False,
        on_device: bool = False,
    ) -> None:
        _check_processes(workers, rank, ranks)
        workers = 0 if on_device else workers
        if len(dataset) == 0:
            raise CaasegError("the dataset has no samples; check its directory and its split")
        if batch_size < 1 or batch_size % ranks:
            raise CaasegError(f"batch_size is {batch_size}; expected a multiple of the number of ranks, {ranks}")
        for name, value in (("seed", seed), ("step", step)):
            if value < 0:
                raise CaasegError(f"{name} is {value}; expected 0 or more")
        if bad_files not in get_args(BadFiles):
            raise CaasegError(f"bad_files is {bad_files!r}; expected any of {', '.join(get_args(BadFiles))}")
        if not 0 <= bad_share <= 1:
            raise CaasegError(f"bad_share is {bad_share}; expected 0 to 1")
        positions = range(rank * batch_size // ranks, (rank + 1) * batch_size // ranks)
        # The DataLoader requests a new batch when a batch arrives: one more buffer than batches in progress is enough.
        self._buffers = BatchBuffers.allocate(workers * PREFETCH + 1, len(positions), augmentation.crop)
        attempts = 1 if bad_files == "stop" else MAX_ATTEMPTS
        self._sampler = StepSampler(step)
        self._batches = TrainingBatches(dataset, augmentation, batch_size, positions, seed, attempts, self._buffers)
        self._loader: DataLoader[FilledBuffer] = DataLoader(
            self._batches,
            sampler=self._sampler,
            batch_size=None,
            collate_fn=_identity,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH if workers else None,
            worker_init_fn=_leave_process_group,
        )
        self._length = len(dataset)
        self._bad_files = bad_files
        self._bad_share = bad_share
        self._pin_memory = pin_memory
        self._on_device = on_device
        self.skipped: dict[int, str] = {}
        """Error message of each skipped sample by dataset index."""

    @property
    def step(self) -> int:
        return self._sampler.step

    def __iter__(self) -> Iterator[Batch]:
        # Pinning takes time, so it runs in a thread while the previous step is launched.
        batches: Iterator[Batch]
        if self._on_device:
            plans = self._plans()
            batches = map(augment_batch, prefetch(plans) if self._pin_memory else plans)
        else:
            copies = self._copies(iter(self._loader), Tensor.pin_memory if self._pin_memory else Tensor.clone)
            batches = prefetch(copies) if self._pin_memory else copies
        for batch in batches:
            self._sampler.step += 1
            yield batch

    def _plans(self) -> Iterator[BatchPlan]:
        """Yield the samples of each step with their augmentation, which the device then computes."""
        for step in count(self.step):
            errors: dict[int, str] = {}
            drawn = [one for one in self._batches.draw(step, errors) if one is not None]
            self._handle_errors(errors, is_complete=len(drawn) == len(self._batches.positions))
            samples, params = zip(*drawn, strict=True)
            plan = plan_batch(samples, params, self._batches.augmentation.crop)
            yield plan.pinned() if self._pin_memory else plan

    def _copies(self, filled: Iterator[FilledBuffer], copy: Callable[[Tensor], Tensor]) -> Iterator[Batch]:
        """Copy batches out of their buffers, which workers soon overwrite."""
        for buffer, names, errors in filled:
            self._handle_errors(errors, is_complete=names is not None)
            assert names is not None
            yield Batch(copy(self._buffers.images[buffer]), copy(self._buffers.labels[buffer]), names)

    def _handle_errors(self, errors: dict[int, str], *, is_complete: bool) -> None:
        for index, error in errors.items():
            self._handle_bad_file(index, error)
        if not is_complete:
            raise BadFileError(f"no sample could be read in {MAX_ATTEMPTS} attempts; check the dataset")

    def _handle_bad_file(self, index: int, error: str) -> None:
        if self._bad_files == "stop":
            raise BadFileError(error)
        if index in self.skipped:
            return
        self.skipped[index] = error
        logger.warning("skipped %s", error)
        if len(self.skipped) > max(1, self._bad_share * self._length):
            raise BadFileError(
                f"{len(self.skipped)} of {self._length} samples cannot be read, more than the allowed fraction of "
                f"{self._bad_share:g}; the last: {error}"
            )


def prefetch(items: Iterator[T], number: int = 2) -> Iterator[T]:
    """Yield the same items, computed up to `number` items ahead in a thread."""
    queue: Queue[tuple[T | None, BaseException | None]] = Queue(number)
    stopped = Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            with suppress(Full):
                queue.put((item, error), timeout=0.1)
                return

    def produce() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    Thread(target=produce, daemon=True).start()
    try:
        while True:
            item, error = queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()


@dataclass(frozen=True)
class EvaluationSamples(Dataset[Sample | str]):
    """Samples, padded to one size if requested; the error message for files that cannot be used."""

    dataset: SegmentationDataset
    pad_to: tuple[int, int] | None

    def __getitem__(self, index: int) -> Sample | str:
        try:
            sample = self.dataset[index]
        except BadFileError as error:
            return str(error)
        return sample if self.pad_to is None else pad(sample, self.pad_to)


class EvaluationLoader:
    """Load each sample once, in order; with several ranks, each sample on exactly one rank.

    The number of samples per rank, and so of batches, may differ by one.

    Args:
        dataset: source of samples.
        batch_size: samples per batch of this rank; above 1, images of different sizes need `pad_to`.
        pad_to: height and width that fit all images; None does not pad.
        workers: worker processes; 0 reads in this process.
        rank: index of this process, from 0.
        ranks: number of processes that evaluate together.
        pin_memory: return batches in pinned memory; use it if they are copied to a GPU.
        bad_files: "stop" raises BadFileError at the first bad file; "skip" leaves the sample out.
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
        pin_memory: bool = False,
        bad_files: BadFiles = "stop",
    ) -> None:
        _check_processes(workers, rank, ranks)
        if batch_size < 1:
            raise CaasegError(f"batch_size is {batch_size}; expected 1 or more")
        indices = range(rank, len(dataset), ranks)
        self._batches = [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]
        self._loader: DataLoader[Batch | str | None] = DataLoader(
            EvaluationSamples(dataset, pad_to),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=partial(_collate_or_error, skip=bad_files == "skip"),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_leave_process_group,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            if isinstance(batch, str):
                raise BadFileError(batch)
            if batch is not None:
                yield batch


def useful_workers(workers: int, samples: int) -> int:
    """Return the number of workers worth starting to read a number of samples once: `workers` or fewer."""
    return min(workers, samples // SAMPLES_PER_WORKER)


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples of one size."""
    first = samples[0]
    for sample in samples:
        if sample.label.shape != first.label.shape:
            sizes = " and ".join(f"{s.name} is {s.label.shape[0]} x {s.label.shape[1]}" for s in (first, sample))
            raise CaasegError(f"{sizes}: one batch needs one size; pad the images, or use batch size 1")
    images = torch.stack([sample.image for sample in samples])
    labels = torch.stack([sample.label for sample in samples])
    return Batch(images.contiguous(), labels, tuple(sample.name for sample in samples))


def _collate_or_error(samples: Sequence[Sample | str], *, skip: bool) -> Batch | str | None:
    """Return the batch, or the first error; with `skip`, the batch without bad samples, None if there are no others."""
    error = next((sample for sample in samples if isinstance(sample, str)), None)
    if error is not None and not skip:
        return error
    good = [sample for sample in samples if not isinstance(sample, str)]
    return collate(good) if good else None


def is_lost_worker(error: BaseException) -> bool:
    """Return whether an error says that a loading process was killed. torch raises it wherever the main process is."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


def _leave_process_group(worker: int) -> None:
    """Prevent Ctrl-C, or a SIGTERM to the process group, from ending a worker.

    The main process may need another batch to finish its step. It stops its workers itself, and they also end when it
    has ended.
    """
    if hasattr(os, "setpgrp"):  # not on Windows
        os.setpgrp()


def _identity(filled: Any) -> Any:  # the default collate_fn would convert the NamedTuple
    return filled


@lru_cache(maxsize=2)  # a batch may span two epochs
def _order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return _random_stream(seed, ORDER, epoch).permutation(length)


def _random_stream(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *purpose))))


def _check_processes(workers: int, rank: int, ranks: int) -> None:
    if workers < 0:
        raise CaasegError(f"workers is {workers}; expected 0 or more")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks} ranks; expected 0 to {ranks - 1}")
