"""Pictures and HTML of pixel attention."""

import numpy as np
import torch

from caaseg.analysis.pixel_attention import PixelAttention
from caaseg.models.heads.base import Head
from caaseg.reports.pixel_attention import (
    COLUMN,
    ROW,
    draw_lines,
    draw_overlay,
    draw_reach,
    gate_chart,
    legend,
    page_heading,
    pixel_note,
)
from tests.small_models import small_model

GRAY = np.full((40, 60, 3), 120, np.uint8)  # enlarged ten times
ATTENTION = PixelAttention(
    cell=(1, 0),
    column=torch.tensor([0.9, 0.09, 0.01, 0.0]),
    row=torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0, 0.0]),
    reach=torch.tensor([[0.1, 0, 0, 0, 0, 0], [0.2, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 0.7]]),
    gates=torch.tensor([0.5, 0.1, 0.9, 0.3]),
)


def test_lines_are_bright_where_the_weights_are() -> None:
    drawn = draw_lines(GRAY, ATTENTION, (13, 0))
    assert drawn is not None
    assert drawn.shape == (400, 600, 3)
    dark = drawn[390, 590].astype(int)
    top, below = drawn[5, 5].astype(int), drawn[270, 5].astype(int)  # weights of 0.9 and 0.01 in the column
    assert np.abs(top - np.array(COLUMN)).max() < 40
    assert dark.sum() < below.sum() < top.sum()
    assert (drawn[390, 5] == dark).all()  # no weight, no light
    along = drawn[130, 150].astype(float)  # half of the strongest weight of the row
    assert np.abs(along / along.max() - np.array(ROW) / max(ROW)).max() < 0.15


def test_reach_is_brightest_at_the_largest_weight() -> None:
    drawn = draw_reach(GRAY, ATTENTION, (13, 0)).astype(int).sum(-1)
    assert drawn[390, 590] == drawn[200:].max()  # below the ring
    assert drawn[390, 5] < drawn[5, 5] < drawn[390, 590]


def test_an_overlay_fades_into_the_image() -> None:
    labels = torch.zeros(40, 60, dtype=torch.uint8)
    labels[:, 30:] = 1
    palette = [(200, 0, 0), (0, 0, 200)]
    assert (draw_overlay(GRAY, labels, palette, 0.0, (0, 0))[300, 300] == 120).all()
    full = draw_overlay(GRAY, labels, palette, 1.0, (0, 0))
    assert full[300, 100].tolist() == [200, 0, 0]
    assert full[300, 500].tolist() == [0, 0, 200]


def test_the_legend_sorts_classes_by_share_and_escapes_names() -> None:
    labels = torch.zeros(100, 100, dtype=torch.uint8)
    labels[0, :3] = 2
    labels[50:] = 3
    labels[50, :30] = 0
    html = legend(labels, ["road", "never seen", "<b>sign</b>", "sky"], [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12)])
    assert "never seen" not in html
    assert html.index("road") < html.index("sky") < html.index("&lt;b&gt;sign&lt;/b&gt;")
    assert "50.3 %" in html
    assert "&lt;0.1 %" in html
    assert "rgb(10, 11, 12)" in html


def test_the_heading_names_models_and_licenses() -> None:
    model = small_model("fcn")
    assert "license" not in page_heading([("mine", model)])
    model.config = model.config.replace(license="CC-BY-NC-4.0")
    found = page_heading([("camvid", model)])
    assert "<b>camvid</b> fcn on test_resnet, 5 classes, weights licensed under CC-BY-NC-4.0</span>" in found


def test_the_largest_and_smallest_gates_are_shown() -> None:
    html = gate_chart(torch.tensor([0.5, 0.1, 0.9, 0.3]))
    assert [html.index(f">{channel}</th>") for channel in (2, 0, 1, 3)] == sorted(
        html.index(f">{channel}</th>") for channel in range(4)
    )
    assert "width: 90.0%" in html
    assert gate_chart(torch.linspace(0.2, 0.5, 100)).count("<tr>") == 12
    equal = gate_chart(torch.linspace(0.249, 0.251, 100))
    assert "<tr>" not in equal
    assert "All gates are between 0.2490 and 0.2510: they weight all channels almost equally." in equal


def test_the_note_has_the_weights_of_the_pixel_and_of_the_strongest_other_one() -> None:
    html = pixel_note(ATTENTION, Head(), "road", (13, 0), GRAY.shape)
    assert "Row 13, column 0: <b>road</b>" in html
    assert "The attention weight of the pixel itself is 20.0 %." in html
    assert "The largest other weight is 70.0 %, at row 39, column 59." in html
