"""Files of labels, overlays and probabilities."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from caaseg.data.decode import read_mask
from caaseg.drawing.label_files import (
    ProbabilityFile,
    exceeds_jpeg_limit,
    save_labels,
    save_overlay,
    save_source_values,
)
from caaseg.drawing.overlays import overlay

PALETTE = ((10, 20, 30), (200, 0, 0), (0, 200, 0))


def test_labels_are_an_indexed_png_of_class_ids(tmp_path: Path) -> None:
    labels = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8)
    save_labels(labels, PALETTE, tmp_path / "a.png", "made by hand")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "P"
        assert np.array_equal(np.array(image), labels)
        assert np.array_equal(np.array(image.convert("RGB")), np.array(PALETTE, dtype=np.uint8)[labels])
        assert image.info["caaseg"] == "made by hand"
    assert (tmp_path / "a.png").read_bytes()[24] == 8  # bits per value: not packed
    assert np.array_equal(read_mask(tmp_path / "a.png"), labels)


@pytest.mark.parametrize(
    ("values", "mode"),
    [((0, 255, 7), "L"), ((1, 40_000, 255), "I;16"), (((0, 0, 0), (192, 0, 0), (1, 2, 3)), "RGB")],
)
def test_source_values_are_those_of_the_masks(values: tuple[int, ...], mode: str, tmp_path: Path) -> None:
    labels = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8)
    save_source_values(labels, values, tmp_path / "a.png", "made by hand")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == mode
        assert np.array_equal(np.array(image), np.array(values)[labels])
        assert image.info["caaseg"] == "made by hand"


def test_an_overlay_drawn_in_bands_is_the_overlay(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (600, 9, 3)).astype(np.uint8)  # more rows than one band
    labels = rng.integers(0, 3, (600, 9)).astype(np.uint8)
    save_overlay(torch.from_numpy(pixels).permute(2, 0, 1), labels, PALETTE, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.array(image), overlay(pixels, labels, PALETTE))


def test_images_above_the_jpeg_limit_need_png(tmp_path: Path) -> None:
    for width, too_large in ((65_500, False), (65_501, True)):
        assert exceeds_jpeg_limit((1, width)) == too_large
        image, labels = torch.zeros(3, 1, width, dtype=torch.uint8), np.zeros((1, width), np.uint8)
        save_overlay(image, labels, PALETTE, tmp_path / ("a.png" if too_large else "a.jpg"))
        if too_large:
            with pytest.raises(OSError, match="broken data stream"):
                save_overlay(image, labels, PALETTE, tmp_path / "b.jpg")
            assert not list(tmp_path.glob("*b.*"))


def test_probabilities_written_in_tiles_are_read_as_one_array(tmp_path: Path) -> None:
    whole = torch.rand(3, 7, 10).softmax(0)
    with ProbabilityFile(tmp_path / "a.npy", (7, 10), 3) as file:
        for rows in (slice(4, 7), slice(0, 4)):
            for columns in (slice(0, 6), slice(6, 10)):
                file.write(rows, columns, whole[:, rows, columns])
        assert not (tmp_path / "a.npy").exists()
    found = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert found.dtype == np.float16
    assert np.array_equal(found, whole.permute(1, 2, 0).half().numpy())


def test_unfinished_probabilities_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ProbabilityFile(tmp_path / "a.npy", (7, 10), 3):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
