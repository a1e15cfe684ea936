"""Training images resized to a smaller size, and the sizes of images in a dataset."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from caaseg.data.datasets.pairs import PairDataset
from caaseg.data.decode import read_size
from caaseg.data.sample import BadFileError, Sample, SegmentationDataset

MAX_FILES = 500
MAX_SAMPLES = 20


class ResizedDataset:
    """A dataset with a limit on the short side of its images; labels are resized to match, without interpolation.

    Args:
        dataset: the dataset.
        short_side: larger images are resized so that their short side has this length.
    """

    def __init__(self, dataset: SegmentationDataset, short_side: int) -> None:
        self.classes = dataset.classes
        self.palette = dataset.palette
        self._dataset = dataset
        self._short_side = short_side

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        image, label, name = self._dataset[index]
        height, width = label.shape
        factor = self._short_side / min(height, width)
        if factor >= 1:
            return Sample(image, label, name)
        size = max(1, round(height * factor)), max(1, round(width * factor))
        smaller = interpolate(image[None].float(), size, mode="bilinear", antialias=True, align_corners=False)[0]
        return Sample(smaller.round().clamp(0, 255).to(torch.uint8), _nearest(label, size), name)


def short_sides(dataset: SegmentationDataset, *, skip_bad_files: bool = False) -> list[int]:
    """Return the sorted short sides of images spread evenly over a dataset.

    Args:
        dataset: the dataset.
        skip_bad_files: leave out images that cannot be read, unless none can be read.
    """
    parts: list[SegmentationDataset] = getattr(dataset, "datasets", [dataset])  # of concatenated splits
    sides, errors = list[int](), list[BadFileError]()
    for part in parts:
        limit = MAX_FILES if isinstance(part, PairDataset) else MAX_SAMPLES
        indices = sorted({k * len(part) // min(limit, len(part)) for k in range(min(limit, len(part)))})
        for index in indices:
            try:
                sides.append(_short_side(part, index))
            except BadFileError as error:
                errors.append(error)
                if not skip_bad_files:
                    raise
    if errors and not sides:
        raise errors[0]
    return sorted(sides)


def _short_side(dataset: SegmentationDataset, index: int) -> int:
    if isinstance(dataset, PairDataset):
        return min(read_size(dataset.pairs[index].image))
    return min(dataset[index].label.shape)


def _nearest(label: Tensor, size: tuple[int, int]) -> Tensor:
    rows, columns = (
        ((torch.arange(target) + 0.5) * source / target).long().clamp(max=source - 1)
        for source, target in zip(label.shape, size, strict=True)
    )
    return label[rows][:, columns]
