"""A dataset cached in memory: each file is decoded once.

Samples are packed into a few large blocks. Forked worker processes share their pages; torch passes each block to
spawned workers once, as shared memory.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from caaseg.data.sample import BadFileError, Sample, SegmentationDataset

BLOCK_BYTES = 1 << 28
MAX_THREADS = 8  # decoders release the GIL


class StoredTensor(NamedTuple):
    """Position and layout of a tensor in the blocks."""

    block: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class StoredSample(NamedTuple):
    """Position of a sample in the blocks."""

    image: StoredTensor
    label: StoredTensor
    name: str


class CachedDataset:
    """Cache all samples of a dataset in memory, bit for bit.

    Samples share memory with the cache: do not modify them in place. A file that cannot be read raises its
    BadFileError when its sample is requested, as in the dataset itself.

    Args:
        dataset: the dataset to read.
        block_bytes: size of the blocks of memory that hold several samples each.
    """

    def __init__(self, dataset: SegmentationDataset, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.classes = dataset.classes
        self.palette = dataset.palette
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._used = 0  # bytes of the last block
        self._samples: list[StoredSample | str] = []  # a string is the error message of a bad file

        def read(index: int) -> Sample | str:
            try:
                return dataset[index]
            except BadFileError as error:
                return str(error)

        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            for sample in threads.map(read, range(len(dataset))):
                if isinstance(sample, str):
                    self._samples.append(sample)
                else:
                    image, label = self._store(sample.image), self._store(sample.label)
                    self._samples.append(StoredSample(image, label, sample.name))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        stored = self._samples[index]
        if isinstance(stored, str):
            raise BadFileError(stored)
        return Sample(self._load(stored.image), self._load(stored.label), stored.name)

    @property
    def nbytes(self) -> int:
        """Memory of all samples."""
        return sum(len(block) for block in self._blocks[:-1]) + self._used

    def to(self, device: torch.device) -> "CachedDataset":
        """Return the dataset with all samples on a device. Nothing is copied if they are there."""
        moved = copy(self)
        filled = [*self._blocks[:-1], *(block[: self._used] for block in self._blocks[-1:])]
        moved._blocks = [block.to(device) for block in filled]
        return moved

    def _store(self, tensor: Tensor) -> StoredTensor:
        if not self._blocks or self._used + tensor.numel() > len(self._blocks[-1]):
            # Untouched pages take no memory, so a large block costs nothing until it is filled.
            self._blocks.append(torch.empty(max(self._block_bytes, tensor.numel()), dtype=torch.uint8))
            self._used = 0
        strides = torch.empty_like(tensor, device="meta").stride()  # dense, in the same order of dimensions
        stored = StoredTensor(len(self._blocks) - 1, self._used, tuple(tensor.shape), strides)
        np.copyto(self._load(stored).numpy(), tensor.numpy())  # torch's copy threads would slow down the decoders
        self._used += tensor.numel()
        return stored

    def _load(self, stored: StoredTensor) -> Tensor:
        return self._blocks[stored.block].as_strided(stored.shape, stored.strides, stored.offset)


def estimated_bytes(dataset: SegmentationDataset) -> int:
    """Estimate the memory of a cached dataset from the size of its first readable sample."""
    for index in range(len(dataset)):
        try:
            sample = dataset[index]
        except BadFileError:
            continue
        return len(dataset) * (sample.image.nbytes + sample.label.nbytes)
    return 0
