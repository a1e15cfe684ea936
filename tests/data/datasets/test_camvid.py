"""CamVid in its official tree and its variants."""

import re
from pathlib import Path

import pytest
import torch

from caaseg.data.catalogue import open_dataset
from caaseg.data.datasets.camvid import CamVid
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from tests.data import trees
from tests.data.trees import CAMVID


@pytest.mark.parametrize("full_paths", [False, True])
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_every_split_of_every_variant_is_read(tmp_path: Path, suffix: str, full_paths: bool) -> None:
    trees.camvid(tmp_path, suffix=suffix, full_paths=full_paths)
    for split, number in (("train", 3), ("val", 2), ("test", 2)):
        dataset = CamVid(tmp_path, split)
        assert len(dataset) == number
        sample = dataset[1]
        assert sample.name == f"0001TP_{split}1"
        assert sample.image.shape == (3, 12, 16)
        assert sample.label.dtype == torch.uint8
        assert trees.values_in(sample.label) == [0, 5, 10, 255]
        assert dataset.missing() == []
    assert dataset.classes[5] == "Tree"
    assert dataset.palette[5] == (128, 128, 0)


def test_the_directory_of_the_published_repository_is_found(tmp_path: Path) -> None:
    trees.camvid(tmp_path / "CamVid", full_paths=True)
    assert len(CamVid(tmp_path, "train")) == 3


def test_a_value_outside_the_table_names_the_file(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    trees.save_mask(tmp_path / "valannot" / "0001TP_val0.png", trees.values_of(0, 12, 255))
    with pytest.raises(BadFileError, match=r"0001TP_val0\.png: label values 12, 255 are outside.*expected 0 to 11"):
        CamVid(tmp_path, "val")[0]


def test_missing_files_are_found_without_opening_any(tmp_path: Path) -> None:
    trees.camvid(tmp_path, suffix=".jpg")
    (tmp_path / "train" / "0001TP_train0.jpg").unlink()
    (tmp_path / "trainannot" / "0001TP_train2.png").unlink()
    dataset = CamVid(tmp_path, "train")
    expected = [tmp_path / "train" / "0001TP_train0.png", tmp_path / "trainannot" / "0001TP_train2.png"]
    assert dataset.missing() == expected
    with pytest.raises(BadFileError, match=re.escape(f"{expected[0]}: no such file")):
        dataset[0]


def test_two_images_with_one_name_are_an_error(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    trees.save_image(tmp_path / "train" / "0001TP_train0.jpg")
    with pytest.raises(BadFileError, match=r"0001TP_train0\.png: 0001TP_train0\.jpg has the same name"):
        CamVid(tmp_path, "train")


def test_sizes_must_agree(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    trees.save_mask(tmp_path / "trainannot" / "0001TP_train0.png", trees.values_of(0, height=16, width=12))
    with pytest.raises(BadFileError, match=r"train0\.png: the mask is 12 x 16 and its image .* 16 x 12; expected"):
        CamVid(tmp_path, "train")[0]


def test_an_unknown_split_and_a_missing_list_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="camvid has no split 'trainval'; expected train or val or test"):
        CamVid(tmp_path, "trainval")
    with pytest.raises(BadFileError, match=r"val\.txt: no such file; expected the split's list of names; run"):
        CamVid(tmp_path, "val")
    for content, reason in ((b"\xff\xfe", "'utf-8' codec"), (b"a\x00b\n", "it has a null byte")):
        (tmp_path / "val.txt").write_bytes(content)
        with pytest.raises(BadFileError, match=rf"val\.txt: cannot be read as a list of names \({reason}"):
            CamVid(tmp_path, "val")


def test_a_split_without_a_sequence_and_the_sequence_alone_are_the_whole_split(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    for folder, suffix in (("train", ".png"), ("trainannot", ".png")):
        (tmp_path / folder / f"0001TP_train2{suffix}").rename(tmp_path / folder / f"Seq05VD_f2{suffix}")
    names = (tmp_path / "train.txt").read_text().replace("0001TP_train2", "Seq05VD_f2")
    (tmp_path / "train.txt").write_text(names)

    def names_of(split: str) -> list[str]:
        return [sample.name for sample in open_dataset("camvid", tmp_path, split)]  # type: ignore[attr-defined]

    assert names_of("train@Seq05VD") == ["Seq05VD_f2"]
    assert names_of("train-Seq05VD") == ["0001TP_train0", "0001TP_train1"]
    assert names_of("train-Seq05VD+val@0001TP") == [*names_of("train-Seq05VD"), *names_of("val")]
    for split in ("train@0006R0", "train-0006R0"):
        message = "split train of camvid has no sequence '0006R0'; expected 0001TP or Seq05VD"
        with pytest.raises(CaasegError, match=message):
            CamVid(tmp_path, split)
    with pytest.raises(CaasegError, match="split val of camvid has no sequence ''; expected 0001TP"):
        CamVid(tmp_path, "val@")
    with pytest.raises(BadFileError, match="no images in split val-0001TP of camvid"):
        open_dataset("camvid", tmp_path, "val-0001TP")


@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")
def test_the_real_dataset_opens() -> None:
    for split, number in (("train", 367), ("val", 101), ("test", 233)):
        dataset = CamVid(CAMVID, split)
        assert len(dataset) == number
        assert dataset.missing() == []
    assert dataset[0].image.shape == (3, 360, 480)
