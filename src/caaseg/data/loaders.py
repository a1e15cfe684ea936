"""Batches for training and for evaluation, with what is random in them fixed by the seed, the step and the place alone.

Training has no epochs: it draws from an endless order, one random permutation of the dataset after another. Sample k of
step s is number s * batch_size + k of that order, seen through an augmentation drawn from (seed, s, k). How many
workers read it, on which rank it lands and whether training was resumed in between changes nothing.

Images stay uint8 until they are on the device, a quarter of the bytes of floats; `transforms.normalise` does the rest.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from caaseg.data.sample import BadFileError, Batch, Sample, SegmentationDataset
from caaseg.data.transforms import Augmentation, padded

logger = logging.getLogger(__name__)

BadFiles = Literal["stop", "skip"]
Place = tuple[int, int]  # step, and place k in its batch

# What a stream of random numbers is for; part of its seed, so that no two are the same.
ORDER, VIEW, REPLACEMENT = range(3)

MOST_REPLACEMENTS = 100


class StepSampler(Sampler[list[Place]]):
    """The places of step after step, without end, or of one rank's share of them.

    `step` is the step that iterating starts with.
    """

    def __init__(self, batch_size: int, *, step: int = 0, rank: int = 0, ranks: int = 1) -> None:
        _check_rank(rank, ranks)
        if batch_size < 1 or batch_size % ranks:
            raise ValueError(f"batch_size is {batch_size}; expected a multiple of the number of ranks, {ranks}")
        if step < 0:
            raise ValueError(f"step is {step}; expected 0 or more")
        self.step = step
        self.share = range(rank * batch_size // ranks, (rank + 1) * batch_size // ranks)

    def __iter__(self) -> Iterator[list[Place]]:
        for step in count(self.step):
            yield [(step, k) for k in self.share]


class Read(NamedTuple):
    """A sample, or what kept it from being read."""

    sample: Sample | None
    faults: dict[int, str]  # why not, by index into the dataset


class Gathered(NamedTuple):
    """What a worker hands over. Faults travel as values: an exception would arrive with a traceback for a message."""

    batch: Batch | None
    faults: dict[int, str]


class TrainingSamples(Dataset[Read]):
    """The sample at each place of each step."""

    def __init__(
        self, dataset: SegmentationDataset, augmentation: Augmentation, batch_size: int, seed: int, bad_files: BadFiles
    ) -> None:
        self.dataset = dataset
        self.augmentation = augmentation
        self.batch_size = batch_size
        self.seed = seed
        self.attempts = 1 if bad_files == "stop" else MOST_REPLACEMENTS

    def __getitem__(self, place: Place) -> Read:
        step, k = place
        epoch, position = divmod(step * self.batch_size + k, len(self.dataset))
        index = int(_order(self.seed, epoch, len(self.dataset))[position])
        faults: dict[int, str] = {}
        for attempt in range(self.attempts):
            try:
                sample = self.dataset[index]
            except BadFileError as error:
                faults[index] = str(error)
                index = int(_stream(self.seed, REPLACEMENT, step, k, attempt).integers(len(self.dataset)))
            else:
                return Read(self.augmentation(sample, _stream(self.seed, VIEW, step, k)), faults)
        return Read(None, faults)


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
        if len(dataset) == 0:
            raise ValueError("the dataset has no samples; check its folder and its split")
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more")
        if bad_files not in get_args(BadFiles):
            raise ValueError(f"bad_files is {bad_files!r}; expected any of {', '.join(get_args(BadFiles))}")
        if not 0 <= bad_share <= 1:
            raise ValueError(f"bad_share is {bad_share}; expected 0 to 1")
        self._sampler = StepSampler(batch_size, step=step, rank=rank, ranks=ranks)
        samples = TrainingSamples(dataset, augmentation, batch_size, seed, bad_files)
        self._loader = _loader(samples, self._sampler, workers)
        self._length = len(dataset)
        self._bad_files = bad_files
        self._bad_share = bad_share
        self.skipped: dict[int, str] = {}
        """What was wrong with each file left out so far, by index into the dataset."""

    @property
    def step(self) -> int:
        return self._sampler.step

    def __iter__(self) -> Iterator[Batch]:
        for batch, faults in self._loader:
            for index, fault in faults.items():
                self._report(index, fault)
            if batch is None:
                raise BadFileError(f"no sample could be read in {MOST_REPLACEMENTS} attempts; check the dataset")
            self._sampler.step += 1
            yield batch

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


class EvaluationSamples(Dataset[Read]):
    """The samples as they are, or padded to one size."""

    def __init__(self, dataset: SegmentationDataset, pad_to: tuple[int, int] | None) -> None:
        self.dataset = dataset
        self.pad_to = pad_to

    def __getitem__(self, index: int) -> Read:
        try:
            sample = self.dataset[index]
        except BadFileError as error:
            return Read(None, {index: str(error)})
        return Read(sample if self.pad_to is None else padded(sample, self.pad_to), {})


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
        _check_rank(rank, ranks)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        share = range(rank, len(dataset), ranks)
        self._batches = [list(share[start : start + batch_size]) for start in range(0, len(share), batch_size)]
        self._loader = _loader(EvaluationSamples(dataset, pad_to), self._batches, workers)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch, faults in self._loader:
            if batch is None:
                raise BadFileError(next(iter(faults.values())))
            yield batch


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples of one size as a batch."""
    first = samples[0]
    for sample in samples:
        if sample.label.shape != first.label.shape:
            sizes = " and ".join(f"{s.name} is {s.label.shape[0]} x {s.label.shape[1]}" for s in (first, sample))
            raise ValueError(f"{sizes}: one batch needs one size; pad to a size, or take batches of 1")
    images = torch.stack([sample.image for sample in samples])
    labels = torch.stack([sample.label for sample in samples])
    return Batch(images, labels, tuple(sample.name for sample in samples))


def _gather(reads: Sequence[Read]) -> Gathered:
    faults = {index: fault for read in reads for index, fault in read.faults.items()}
    samples = [read.sample for read in reads if read.sample is not None]
    return Gathered(collate(samples) if len(samples) == len(reads) else None, faults)


def _loader(
    samples: Dataset[Read], batches: Sampler[list[Place]] | Sequence[list[int]], workers: int
) -> DataLoader[Gathered]:
    if workers < 0:
        raise ValueError(f"workers is {workers}; expected 0 or more")
    return DataLoader(
        samples,  # type: ignore[arg-type]
        batch_sampler=batches,
        collate_fn=_gather,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def _order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return _stream(seed, ORDER, epoch).permutation(length)


def _stream(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *purpose))))


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks} ranks; expected 0 to {ranks - 1}")
