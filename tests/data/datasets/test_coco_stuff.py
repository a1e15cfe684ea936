"""Both COCO-Stuff sets in their official trees."""

from pathlib import Path

import pytest

from caaseg.data.datasets.coco_stuff import CocoStuff10K, CocoStuff164K, conversion_10k
from caaseg.data.prepare.convert import convert
from caaseg.data.sample import IGNORE, BadFileError
from tests.data import trees


def prepared_10k(root: Path) -> None:
    conversion = conversion_10k(root)
    assert conversion is not None
    convert(conversion, trees.no_progress)


def test_10k_ids_are_not_shifted(tmp_path: Path) -> None:
    trees.coco_stuff_10k(tmp_path)
    prepared_10k(tmp_path)
    train, test = CocoStuff10K(tmp_path, "train"), CocoStuff10K(tmp_path, "test")
    assert (len(train), len(test)) == (3, 2)
    assert train[0].label[0, :5].tolist() == [IGNORE, 0, 79, 80, 170]
    assert [train.classes[k] for k in (0, 79, 80, 170)] == ["person", "toothbrush", "banner", "wood"]
    assert train.missing() == test.missing() == []
    assert conversion_10k(tmp_path) is None  # already converted


def test_164k_values_are_the_ids_minus_one(tmp_path: Path) -> None:
    trees.coco_stuff_164k(tmp_path)
    train, val = CocoStuff164K(tmp_path, "train"), CocoStuff164K(tmp_path, "val")
    assert (len(train), len(val)) == (3, 2)
    assert val[1].label[0, :5].tolist() == [0, 79, 80, 170, IGNORE]
    assert val[1].name == "000000000001"


@pytest.mark.parametrize("empty", [12, 91, 183])
def test_an_empty_id_in_10k_is_an_error_and_nothing_is_left_converted(tmp_path: Path, empty: int) -> None:
    trees.coco_stuff_10k(tmp_path, trees.values_of(1, empty))
    with pytest.raises(BadFileError, match=rf"\.mat: label values {empty} are outside the table; expected 0 to 11, 13"):
        prepared_10k(tmp_path)
    assert not (tmp_path / "labels").exists()


@pytest.mark.parametrize("empty", [11, 90, 182])
def test_an_empty_id_in_164k_is_an_error(tmp_path: Path, empty: int) -> None:
    trees.coco_stuff_164k(tmp_path)
    trees.save_mask(tmp_path / "annotations/val2017/000000000000.png", trees.values_of(1, empty))
    with pytest.raises(BadFileError, match=rf"000000000000\.png: label values {empty} are outside the table"):
        CocoStuff164K(tmp_path, "val")[0]


def test_missing_files_are_found(tmp_path: Path) -> None:
    trees.coco_stuff_164k(tmp_path)
    path = tmp_path / "annotations/val2017/000000000000.png"
    path.unlink()
    assert CocoStuff164K(tmp_path, "val").missing() == [path]
    with pytest.raises(BadFileError, match=r"train2017: no such directory; expected the images of COCO 2017"):
        CocoStuff164K(tmp_path / "elsewhere", "train")
    with pytest.raises(BadFileError, match=r"annotations: no \.mat files"):
        conversion_10k(tmp_path / "elsewhere")


def test_damaged_matlab_files_are_named(tmp_path: Path) -> None:
    trees.coco_stuff_10k(tmp_path)
    path = tmp_path / "annotations" / "COCO_train2014_000000000030.mat"
    valid = path.read_bytes()
    for content in (b"", b"nothing of the kind", valid[: len(valid) // 2], b"\0" * 200, valid[:128]):
        path.write_bytes(content)
        with pytest.raises(BadFileError, match=r"000000000030\.mat: (cannot be read as a MATLAB file|no matrix 'S')"):
            prepared_10k(tmp_path)
    assert not (tmp_path / "labels").exists()
