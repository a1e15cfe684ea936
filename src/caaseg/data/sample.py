"""Samples, batches and the dataset protocol."""

from typing import NamedTuple, Protocol

from torch import Tensor

from caaseg.errors import CaasegError

IGNORE = 255
"""Label of pixels that losses and metrics ignore, in every dataset after loading."""

Color = tuple[int, int, int]


class Sample(NamedTuple):
    """One image and its label at their original size, not normalized."""

    image: Tensor  # (3, H, W) uint8, RGB
    label: Tensor  # (H, W) uint8, a class id from 0 or IGNORE
    name: str  # unique within its dataset, for messages


class Batch(NamedTuple):
    """Stacked samples of one size."""

    images: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N, H, W) uint8
    names: tuple[str, ...]


class SegmentationDataset(Protocol):
    """Interface of every dataset: any object with these attributes can be trained on and evaluated."""

    classes: tuple[str, ...]  # name of class id k at position k
    palette: tuple[Color, ...]  # color of class id k at position k

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class BadFileError(CaasegError):
    """A file that cannot be used. The message names it and says what was found, what was expected and what to do."""
