"""Images in order, and the first of each stretch."""

from typing import NamedTuple

import pytest

from caaseg.analysis.ranking import Ranking


class Image(NamedTuple):
    order: tuple[float, str]


def test_all_are_in_order_and_each_stretch_shows_its_first() -> None:
    ranking: Ranking[Image, int] = Ranking(6, 2)
    for index, value in enumerate([5.0, 1.0, 2.0, 0.0, 3.0, 0.0]):
        ranking.add(index, Image((value, f"{index}")), lambda index=index: index)  # type: ignore[misc]
    assert [image.order for image in ranking.images] == [(0, "3"), (0, "5"), (1, "1"), (2, "2"), (3, "4"), (5, "0")]
    assert ranking.shown == (3, 1)  # of equals the first by name; the second half is 3, 4, 5


def test_nothing_labelled_is_said() -> None:
    with pytest.raises(ValueError, match="no pixel of this split is labelled"):
        _ = Ranking[Image, int](6, 2).images
