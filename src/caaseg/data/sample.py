"""What every dataset gives and every loader hands on."""

from typing import NamedTuple, Protocol

from torch import Tensor

from caaseg.errors import CaasegError

IGNORE = 255
"""The label of pixels that no loss and no score looks at, in every dataset after loading."""

Color = tuple[int, int, int]


class Sample(NamedTuple):
    """One image with its label, as the files have it: no resizing, no normalization."""

    image: Tensor  # (3, H, W) uint8, RGB
    label: Tensor  # (H, W) uint8, a class id from 0 or IGNORE
    name: str  # what to call it in a message: unique within its dataset


class Batch(NamedTuple):
    """Samples of one size, stacked."""

    images: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N, H, W) uint8
    names: tuple[str, ...]


class SegmentationDataset(Protocol):
    """What the loaders, the training and the evaluation ask of a dataset."""

    classes: tuple[str, ...]  # the name of class id k at position k
    palette: tuple[Color, ...]  # its color

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class BadFileError(CaasegError):
    """A file that cannot be used: the message says which, what was found, what was expected and what to do."""
