"""Cityscapes in its official tree, and the evaluation server's format."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.data.datasets.cityscapes import CLASSES, Cityscapes, save_submission
from caaseg.data.sample import IGNORE, BadFileError
from tests.data import trees


def test_label_ids_become_the_19_classes(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path)
    train = Cityscapes(tmp_path, "train")
    assert [pair.name for pair in train.pairs] == [f"{c}_000000_{k:06d}" for c in ("aachen", "ulm") for k in (0, 1)]
    assert train[0].label[0, :4].tolist() == [IGNORE, 0, 18, IGNORE]
    assert (train.classes[0], train.classes[18]) == ("road", "bicycle")
    assert len(Cityscapes(tmp_path, "val")) == 2
    assert train.missing() == []


def test_the_test_split_has_no_labels(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path)
    test = Cityscapes(tmp_path, "test")
    assert len(test) == 2
    assert test[0].label.shape == (12, 16)
    assert trees.values_in(test[0].label) == [IGNORE]


@pytest.mark.parametrize("value", [34, 100, 255])
def test_an_id_outside_the_table_is_an_error(tmp_path: Path, value: int) -> None:
    trees.cityscapes(tmp_path)
    trees.save_mask(tmp_path / "gtFine/val/lindau/lindau_000000_000001_gtFine_labelIds.png", trees.values_of(7, value))
    with pytest.raises(BadFileError, match=rf"000001_gtFine_labelIds\.png: label values {value} .* expected 0 to 33"):
        Cityscapes(tmp_path, "val")[1]


def test_missing_labels_and_directories_are_reported(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path)
    path = tmp_path / "gtFine/val/lindau/lindau_000000_000000_gtFine_labelIds.png"
    path.unlink()
    assert Cityscapes(tmp_path, "val").missing() == [path]
    with pytest.raises(BadFileError, match=r"leftImg8bit.train: no such directory; expected the images of Cityscapes"):
        Cityscapes(tmp_path / "elsewhere", "train")


def test_a_submission_has_label_ids(tmp_path: Path) -> None:
    prediction = np.resize(np.arange(19), (1024, 2048))
    path = save_submission(prediction, "berlin_000000_000019", tmp_path / "out")
    with Image.open(path) as image:
        assert (image.mode, image.size, image.format) == ("L", (2048, 1024), "PNG")
        np.testing.assert_array_equal(np.array(image), np.array(CLASSES.values)[prediction])
    assert [found.name for found in path.parent.iterdir()] == ["berlin_000000_000019_prediction.png"]


def test_an_invalid_submission_is_refused(tmp_path: Path) -> None:
    right = np.zeros((1024, 2048), dtype=np.uint8)
    with pytest.raises(
        ValueError, match=r"'\.\./x' is not the name of a Cityscapes sample; expected city_sequence_frame"
    ):
        save_submission(right, "../x", tmp_path)
    with pytest.raises(ValueError, match=r"has shape \(512, 1024\); expected \(1024, 2048\)"):
        save_submission(right[::2, ::2], "berlin_000000_000019", tmp_path)
    wrong = np.where(np.arange(2048) == 5, 255, right)
    with pytest.raises(ValueError, match="has values from 0 to 255; expected class ids from 0 to 18"):
        save_submission(wrong, "berlin_000000_000019", tmp_path)
    assert list(tmp_path.iterdir()) == []
