"""Pictures and number formats of pages."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from caaseg.data.sample import IGNORE
from caaseg.reports.page import Picture, duration, percent, picture, picture_of_marks


def decoded(shown: Picture) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(shown.url.partition(",")[2])))


def test_large_pictures_are_scaled_down_and_stored_in_the_smaller_format() -> None:
    noise = picture(np.random.default_rng(0).integers(0, 255, (1000, 2000, 3), dtype=np.uint8), "noise")
    assert (noise.width, noise.height) == (480, 240)
    assert noise.url.startswith("data:image/jpeg;base64,")
    assert decoded(noise).size == (480, 240)
    flat = picture(np.zeros((50, 60, 3), np.uint8), "flat")
    assert flat.url.startswith("data:image/png;base64,")
    assert decoded(flat).size == (60, 50)


def test_marks_have_their_color_and_ignored_pixels_are_black() -> None:
    image = torch.full((3, 8, 8), 100, dtype=torch.uint8)
    label = torch.zeros(8, 8, dtype=torch.uint8)
    label[0] = IGNORE
    marked = torch.zeros(8, 8, dtype=torch.bool)
    marked[:2] = True
    pixels = np.array(decoded(picture_of_marks(image, [(marked, (225, 45, 60))], label, "wrong")))
    assert (pixels[0] == 0).all()
    assert (pixels[1] == (225, 45, 60)).all()
    assert (pixels[2:] == pixels[2, 0, 0]).all()
    assert pixels[2, 0, 0] > 190


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42 s"), (150, "2.5 min"), (3 * 3600 + 61, "3 h 01 min")])
def test_durations_have_a_suitable_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_missing_scores_are_dashes() -> None:
    assert (percent(0.51234), percent(1.0, 2), percent(float("nan")), percent(None)) == ("51.2", "100.00", "–", "–")  # noqa: RUF001
