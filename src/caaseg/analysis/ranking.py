"""Images of a split in order, and the first of each stretch of it: neighbours, as of one film, are much alike."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Counted(Protocol):
    """An image's numbers; what sorts first is shown first."""

    @property
    def order(self) -> tuple[float, str]: ...


Counts = TypeVar("Counts", bound=Counted)
Shown = TypeVar("Shown")


class Ranking(Generic[Counts, Shown]):
    """Fills up image by image: of all it keeps the numbers, of each stretch the one image to show.

    Args:
        length: images in the split.
        number: equal stretches that it is cut into.
    """

    def __init__(self, length: int, number: int) -> None:
        self.length, self.number = length, number
        self._counts: list[Counts] = []
        self._first: dict[int, tuple[Counts, Shown]] = {}  # by stretch

    def add(self, index: int, counts: Counts, show: Callable[[], Shown]) -> None:
        """Add image `index` of the split; what to show of it is made only if it is kept."""
        self._counts.append(counts)
        stretch = index * self.number // self.length
        if stretch not in self._first or counts.order < self._first[stretch][0].order:
            self._first[stretch] = counts, show()

    @property
    def images(self) -> tuple[Counts, ...]:
        """The numbers of all, in order."""
        if not self._counts:
            raise ValueError("no pixel of this split is labelled: there is nothing to compare with; take another split")
        return tuple(sorted(self._counts, key=lambda counts: counts.order))

    @property
    def shown(self) -> tuple[Shown, ...]:
        """The first of each stretch, in the same order."""
        return tuple(shown for _, shown in sorted(self._first.values(), key=lambda kept: kept[0].order))
