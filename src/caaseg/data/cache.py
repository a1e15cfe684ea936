"""A dataset held in memory: every file is decoded once, and never again.

Samples lie packed in a few large blocks. Worker processes that are forked share their pages; to spawned ones torch
hands each block once, as shared memory. Beside the blocks there are plain numbers alone, which say what lies where.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from caaseg.data.sample import BadFileError, Sample, SegmentationDataset

BLOCK_BYTES = 1 << 28
READERS = 8  # threads, at most: decoders let others run meanwhile


class Place(NamedTuple):
    """Where a tensor lies."""

    block: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Kept(NamedTuple):
    """Where a sample lies."""

    image: Place
    label: Place
    name: str


class CachedDataset:
    """Any dataset, read once when this is made; samples are the same, bit for bit.

    Samples share memory with what is held: read them, and write elsewhere. A file that cannot be used is reported when
    its sample is asked for, as the dataset itself would.
    """

    def __init__(self, dataset: SegmentationDataset) -> None:
        self.classes = dataset.classes
        self.palette = dataset.palette
        self._blocks: list[Tensor] = []
        self._used = 0  # bytes of the last block
        self._samples: list[Kept | str] = []  # or what is wrong with the file

        def read(index: int) -> Sample | str:
            try:
                return dataset[index]
            except BadFileError as error:
                return str(error)

        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
            for found in readers.map(read, range(len(dataset))):
                self._samples.append(found if isinstance(found, str) else self._keep(found))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        kept = self._samples[index]
        if isinstance(kept, str):
            raise BadFileError(kept)
        return Sample(self._at(kept.image), self._at(kept.label), kept.name)

    def _keep(self, sample: Sample) -> Kept:
        return Kept(self._put(sample.image), self._put(sample.label), sample.name)

    def _put(self, tensor: Tensor) -> Place:
        if not self._blocks or self._used + tensor.numel() > len(self._blocks[-1]):
            # Pages that nothing is written to take no memory.
            self._blocks.append(torch.empty(max(BLOCK_BYTES, tensor.numel()), dtype=torch.uint8))
            self._used = 0
        strides = torch.empty_like(tensor, device="meta").stride()  # the same order of axes, without gaps
        place = Place(len(self._blocks) - 1, self._used, tuple(tensor.shape), strides)
        np.copyto(self._at(place).numpy(), tensor.numpy())  # torch's threads would be in the way of the readers
        self._used += tensor.numel()
        return place

    def _at(self, place: Place) -> Tensor:
        return self._blocks[place.block].as_strided(place.shape, place.strides, place.offset)


def estimated_bytes(dataset: SegmentationDataset) -> int:
    """What a dataset takes in memory if all samples are as large as the first that can be read."""
    for index in range(len(dataset)):
        try:
            sample = dataset[index]
        except BadFileError:
            continue
        return len(dataset) * (sample.image.nbytes + sample.label.nbytes)
    return 0
