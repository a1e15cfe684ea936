"""Several splits as one, such as train+val."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from caaseg.data.sample import Sample, SegmentationDataset


class JoinedDataset:
    """One dataset after another, all of the same classes."""

    def __init__(self, parts: Sequence[SegmentationDataset]) -> None:
        self.parts = list(parts)
        self.ends = list(accumulate(len(part) for part in parts))
        self.classes = parts[0].classes
        self.palette = parts[0].palette
        for part in parts:
            if part.classes != self.classes:
                raise ValueError(f"splits of {len(self.classes)} and {len(part.classes)} classes cannot be joined")

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Sample:
        which = bisect_right(self.ends, index)
        return self.parts[which][index - (self.ends[which - 1] if which else 0)]
