"""Ranking of the images of a split, with one image to show per section.

A section is a run of consecutive images. One image per section is shown because neighboring images, such as frames of
one video, look alike.
"""

from typing import Generic, Protocol, TypeVar

from caaseg.errors import CaasegError


class Ranked(Protocol):
    """Pixel counts of an image with a sort key; the smallest key ranks first."""

    @property
    def rank_key(self) -> tuple[float, str]: ...


Counts = TypeVar("Counts", bound=Ranked)
Shown = TypeVar("Shown")


class Ranking(Generic[Counts, Shown]):
    """Collect the counts of all images and the first-ranked image of each section.

    Args:
        num_images: number of images in the split.
        num_sections: number of equal sections.
    """

    def __init__(self, num_images: int, num_sections: int) -> None:
        self.num_images, self.num_sections = num_images, num_sections
        self._counts: list[Counts] = []
        self._first: dict[int, tuple[Counts, Shown]] = {}  # by section

    def add(self, index: int, counts: Counts, shown: Shown) -> None:
        """Add image `index` of the split; `shown` is stored only while the image ranks first in its section."""
        self._counts.append(counts)
        section = index * self.num_sections // self.num_images
        if section not in self._first or counts.rank_key < self._first[section][0].rank_key:
            self._first[section] = counts, shown

    @property
    def images(self) -> tuple[Counts, ...]:
        """The counts of all images, ranked."""
        if not self._counts:
            raise CaasegError("no pixel of this split is labeled, so there is nothing to compare; use another split")
        return tuple(sorted(self._counts, key=lambda counts: counts.rank_key))

    @property
    def shown(self) -> tuple[Shown, ...]:
        """The first-ranked image of each section, ranked."""
        return tuple(shown for _, shown in sorted(self._first.values(), key=lambda first: first[0].rank_key))
