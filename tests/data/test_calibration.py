"""Images for the calibration of INT8 models."""

from pathlib import Path

import pytest

from caaseg.data.calibration import MAX_COMPARED, MAX_IMAGES, evenly_spaced, find_dataset, open_calibration
from caaseg.errors import CaasegError
from tests.data.trees import save_image, save_mask, values_of


def test_items_are_evenly_spaced() -> None:
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced([3, 1], 4) == [3, 1]


def test_a_directory_of_images_is_calibrated_on_some_and_compared_on_others(tmp_path: Path) -> None:
    for k in range(40):
        save_image(tmp_path / f"day{k % 2}/{k}.png", height=k + 1)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "clip.mp4").write_bytes(b"")
    assert find_dataset(tmp_path) is None
    calibration = open_calibration(tmp_path, None)
    assert len(calibration.images) == MAX_IMAGES < 40 < MAX_COMPARED
    heights = [[read().shape[1] for read in images] for images in calibration]
    assert sorted(heights[0] + heights[1]) == list(range(1, 41))


def test_few_images_are_used_for_calibration_and_for_comparison(tmp_path: Path) -> None:
    for k in range(8):
        save_image(tmp_path / f"{k}.jpg")
    calibration = open_calibration(tmp_path, None)
    assert len(calibration.images) == len(calibration.others) == 8


def test_training_images_of_a_labeled_dataset_are_used_but_not_its_masks(tmp_path: Path) -> None:
    for k in range(12):
        save_image(tmp_path / f"images/{k}.jpg")
        save_mask(tmp_path / f"masks/{k}.png", values_of(0, 1))
    assert find_dataset(tmp_path) == "folder"
    assert len(open_calibration(tmp_path, "folder").images) == 11  # one is in val
    assert len(open_calibration(tmp_path / "images", None).images) == 12


def test_camvid_is_recognized(tmp_path: Path) -> None:
    names = [f"a{k}" for k in range(8)]
    for name in names:
        save_image(tmp_path / f"train/{name}.png")
        save_mask(tmp_path / f"trainannot/{name}.png", values_of(0, 11))
    (tmp_path / "train.txt").write_text("\n".join(names))
    assert find_dataset(tmp_path) == "camvid"
    assert len(open_calibration(tmp_path, "camvid").images) == 8


def test_missing_and_too_few_images_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CaasegError, match="none: no such directory; expected images for calibration"):
        open_calibration(tmp_path / "none", None)
    with pytest.raises(CaasegError, match=r"0 images for calibration; expected at least 8, .*; add images"):
        open_calibration(tmp_path, None)
    for k in range(7):
        save_image(tmp_path / f"{k}.png")
    with pytest.raises(CaasegError, match=r"7 images for calibration; expected at least 8"):
        open_calibration(tmp_path, None)
