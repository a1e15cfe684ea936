"""Lookup tables from stored values and colors to class ids."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.data.labels import ColorTable, LabelTable, distinct_colors, load_class_table
from caaseg.data.sample import IGNORE, BadFileError

HERE = Path("mask.png")


def test_8_bit_and_wider_values_use_the_same_table() -> None:
    table = LabelTable({0: IGNORE, 3: 0, 300: 1})
    narrow = np.array([[0, 3], [3, 0]], dtype=np.uint8)
    wide = np.array([[0, 3], [300, 0]], dtype=np.uint16)
    assert table.apply(narrow, HERE).tolist() == [[255, 0], [0, 255]]
    assert table.apply(wide, HERE).tolist() == [[255, 0], [1, 255]]
    assert table.apply(np.asfortranarray(wide.T), HERE).tolist() == [[255, 1], [0, 255]]
    assert table.apply(narrow.T, HERE).dtype == table.apply(wide, HERE).dtype == np.uint8


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_a_value_outside_the_table_is_an_error_with_file_and_values(dtype: type[np.integer]) -> None:
    raw = np.array([[0, 1, 7], [9, 11, 2]], dtype=dtype)
    message = "mask.png: label values 7, 9 are outside the table; expected 0 to 2, 11; correct the mask"
    with pytest.raises(BadFileError, match=re.escape(message)):
        LabelTable({0: 0, 1: 1, 2: 2, 11: IGNORE}).apply(raw, HERE)


def test_negative_and_huge_values_are_outside_the_table() -> None:
    raw = np.array([[-1, 70_000, *range(10, 20)]], dtype=np.int32)
    with pytest.raises(BadFileError, match=r"label values -1, 10, 11, 12, 13, 14, 15, 16 and 4 more are outside"):
        LabelTable({0: 0}).apply(raw, HERE)


def test_ids_are_a_writable_copy() -> None:
    raw = np.zeros((2, 2), dtype=np.uint8)
    ids = LabelTable({0: 5}).apply(raw, HERE)
    ids[0, 0] = 9
    assert raw.tolist() == [[0, 0], [0, 0]]


def test_colors_become_ids_and_others_are_named(tmp_path: Path) -> None:
    pixels = np.array([[[1, 2, 3], [9, 9, 9]], [[0, 0, 0], [1, 2, 3]]], dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "m.png")
    table = ColorTable({(1, 2, 3): 0, (9, 9, 9): 1, (0, 0, 0): IGNORE})
    assert table.read(tmp_path / "m.png").tolist() == [[0, 1], [255, 0]]
    with pytest.raises(BadFileError, match=r"m\.png: colors \(9, 9, 9\) are outside the color table"):
        ColorTable({(1, 2, 3): 0, (0, 0, 0): IGNORE}).read(tmp_path / "m.png")


def test_default_colors_are_distinct_and_never_black() -> None:
    colors = distinct_colors(254)
    assert len(set(colors)) == 254
    assert (0, 0, 0) not in colors


@pytest.mark.parametrize(
    ("dataset", "number", "first", "last"),
    [
        ("pascal_context", 59, (2, "aeroplane"), (458, "wood")),
        ("coco_stuff", 171, (1, "person"), (182, "wood")),
        ("cityscapes", 19, (7, "road"), (33, "bicycle")),
        ("camvid", 11, (0, "Sky"), (10, "Bicyclist")),
        ("ade20k", 150, (1, "wall"), (150, "flag")),
        ("voc2012", 21, (0, "background"), (20, "tvmonitor")),
    ],
)
def test_shipped_tables_are_complete(dataset: str, number: int, first: tuple[int, str], last: tuple[int, str]) -> None:
    classes = load_class_table(dataset)
    assert len(classes.values) == len(set(classes.values)) == number
    assert len(set(classes.names)) == len(set(classes.palette)) == number
    assert all(isinstance(name, str) and name == name.strip() for name in classes.names)
    assert all(len(color) == 3 and all(0 <= part <= 255 for part in color) for color in classes.palette)
    assert list(classes.values) == sorted(classes.values)
    assert (classes.values[0], classes.names[0]) == first
    assert (classes.values[-1], classes.names[-1]) == last


def test_ade20k_has_the_published_colors_except_for_a_repeated_one() -> None:
    classes = load_class_table("ade20k")
    colors = dict(zip(classes.names, classes.palette, strict=True))
    assert (colors["wall"], colors["bed"], colors["flag"]) == ((120, 120, 120), (204, 5, 255), (92, 0, 255))
    assert colors["road"] == (140, 140, 140)
    assert colors["skyscraper"] == distinct_colors(150)[48]


def test_coco_stuff_leaves_out_the_eleven_empty_ids() -> None:
    raw = load_class_table("coco_stuff").values
    assert sorted(set(range(1, 183)) - set(raw)) == [12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91]
    assert sum(value < 92 for value in raw) == 80


def test_cityscapes_ids_are_the_official_ones() -> None:
    assert load_class_table("cityscapes").values == (
        *(7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33),
    )
