"""ADE20K in its official tree."""

from pathlib import Path

import pytest

from caaseg.data.datasets.ade20k import ADE20K
from caaseg.data.sample import IGNORE, BadFileError
from tests.data import trees


@pytest.mark.parametrize("directory", ["", "ADEChallengeData2016"])
def test_values_are_class_ids_plus_one_and_0_is_ignored(tmp_path: Path, directory: str) -> None:
    trees.ade20k(tmp_path / directory)
    train, val = ADE20K(tmp_path, "train"), ADE20K(tmp_path, "val")
    assert (len(train), len(val)) == (3, 2)
    assert train[2].label[0, :4].tolist() == [IGNORE, 0, 7, 149]
    assert [train.classes[k] for k in (0, 7, 149)] == ["wall", "bed", "flag"]
    assert [pair.name for pair in val.pairs] == ["ADE_val_00000001", "ADE_val_00000002"]
    assert train.missing() == val.missing() == []


def test_grayscale_and_very_small_images_are_read(tmp_path: Path) -> None:
    trees.ade20k(tmp_path)
    gray, small = ADE20K(tmp_path, "val")[0], ADE20K(tmp_path, "val")[1]
    assert gray.image.shape == (3, 12, 16)
    assert (gray.image == gray.image[:1]).all()
    assert (small.image.shape, small.label.shape) == ((3, 2, 3), (2, 3))


@pytest.mark.parametrize("value", [151, 200, 255])
def test_labels_shifted_by_one_are_refused_with_the_cause(tmp_path: Path, value: int) -> None:
    trees.ade20k(tmp_path)
    path = tmp_path / "annotations/validation/ADE_val_00000001.png"
    trees.save_mask(path, trees.values_of(0, 7, 149, value))
    message = (
        rf"ADE_val_00000001\.png: label values {value} are outside the table; expected 0 to 150; .* shifted by one"
    )
    with pytest.raises(BadFileError, match=message):
        ADE20K(tmp_path, "val")[0]


def test_color_masks_of_the_full_dataset_are_refused_with_the_cause(tmp_path: Path) -> None:
    trees.ade20k(tmp_path)
    trees.save_image(tmp_path / "annotations/validation/ADE_val_00000001.png")
    with pytest.raises(
        BadFileError, match=r"ADE_val_00000001\.png: a mask of mode RGB; expected .* the full ADE20K; use"
    ):
        ADE20K(tmp_path, "val")[0]


def test_missing_files_and_directories_are_reported(tmp_path: Path) -> None:
    trees.ade20k(tmp_path)
    path = tmp_path / "annotations/training/ADE_train_00000003.png"
    path.unlink()
    assert ADE20K(tmp_path, "train").missing() == [path]
    with pytest.raises(BadFileError, match=r"images.training: no such directory; expected the images of ADE20K; run"):
        ADE20K(tmp_path / "elsewhere", "train")
    with pytest.raises(ValueError, match="ade20k has no split 'test'; expected train or val"):
        ADE20K(tmp_path, "test")
