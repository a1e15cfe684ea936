"""Ranking of images, and the first image of each section."""

from typing import NamedTuple

import pytest

from caaseg.analysis.ranking import Ranking


class Image(NamedTuple):
    rank_key: tuple[float, str]


def test_all_images_are_ranked_and_each_section_shows_its_first() -> None:
    ranking: Ranking[Image, int] = Ranking(6, 2)
    for index, value in enumerate([5.0, 1.0, 2.0, 0.0, 3.0, 0.0]):
        ranking.add(index, Image((value, f"{index}")), index)
    assert [image.rank_key for image in ranking.images] == [(0, "3"), (0, "5"), (1, "1"), (2, "2"), (3, "4"), (5, "0")]
    assert ranking.shown == (3, 1)  # ties are broken by name; the second section is 3, 4, 5


def test_a_split_without_labeled_pixels_is_rejected() -> None:
    with pytest.raises(ValueError, match="no pixel of this split is labeled"):
        _ = Ranking[Image, int](6, 2).images
