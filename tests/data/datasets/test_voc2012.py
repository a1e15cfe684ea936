"""PASCAL VOC 2012 in its official tree, with and without SBD."""

from pathlib import Path

import pytest

from caaseg.data.catalogue import open_dataset, splits
from caaseg.data.datasets.voc2012 import VOC2012, conversion
from caaseg.data.prepare.convert import convert
from caaseg.data.sample import IGNORE, BadFileError
from tests.data import trees

VOC = Path("VOCdevkit/VOC2012")
LISTS = VOC / "ImageSets" / "Segmentation"
TRAIN_AUG = [*trees.VOC_NAMES["train"], "2008_000002", "2008_000003"]


def prepared(root: Path) -> None:
    todo = conversion(root)
    assert todo is not None
    convert(todo, trees.no_progress)


def test_palette_indices_are_class_ids_and_255_is_ignored(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    for split, number in (("train", 2), ("val", 1), ("trainval", 3)):
        dataset = VOC2012(tmp_path, split)
        assert len(dataset) == number
        assert dataset[0].label[0, :4].tolist() == [0, 1, 20, IGNORE]  # SegmentationObject has 2 and 3
        assert dataset.missing() == []
    assert [dataset.classes[k] for k in (0, 1, 20)] == ["background", "aeroplane", "tvmonitor"]
    assert dataset.palette[20] == (0, 64, 128)


def test_train_aug_adds_images_of_sbd_in_neither_train_nor_val(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.sbd(tmp_path)
    prepared(tmp_path)
    assert conversion(tmp_path) is None  # already converted
    dataset = VOC2012(tmp_path, "train_aug")
    assert [pair.name for pair in dataset.pairs] == TRAIN_AUG
    assert dataset[0].label[0, :4].tolist() == [0, 1, 20, IGNORE]  # the labels of VOC
    assert dataset[2].label[0, :3].tolist() == [0, 5, 20]
    assert dataset.missing() == []
    found = sorted(path.name for path in (tmp_path / VOC / "SegmentationClassAug").iterdir())
    assert found == ["2008_000002.png", "2008_000003.png"]


def test_without_sbd_train_aug_says_what_to_do_and_the_others_work(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    assert conversion(tmp_path) is None
    assert splits("voc2012", tmp_path) == ("train", "val", "trainval")
    assert [len(open_dataset("voc2012", tmp_path, split)) for split in splits("voc2012", tmp_path)] == [2, 1, 3]
    message = (
        rf"trainaug\.txt: no such file; .*; run caaseg data prepare voc2012 --root {tmp_path} --optional to add the "
        "labels of SBD, or use split train"
    )
    with pytest.raises(BadFileError, match=message):
        open_dataset("voc2012", tmp_path, "train_aug")


def test_files_converted_by_other_projects_are_read(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.write_lines(tmp_path / LISTS / "trainaug.txt", TRAIN_AUG[::-1])
    for name in (*TRAIN_AUG, *trees.VOC_NAMES["val"]):  # they convert all of SBD
        trees.save_mask(tmp_path / VOC / "SegmentationClassAug" / f"{name}.png", trees.values_of(0, 5))
    dataset = open_dataset("voc2012", tmp_path, "train_aug")
    assert len(dataset) == 4
    assert [trees.values_in(dataset[k].label) for k in (0, 3)] == [[0, 5], [0, 1, 20, IGNORE]]


def test_validation_images_in_train_aug_are_refused(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.write_lines(tmp_path / LISTS / "trainaug.txt", [*trees.VOC_NAMES["train"], *trees.VOC_NAMES["val"]])
    with pytest.raises(BadFileError, match=r"trainaug\.txt: images of split val: 2007_000033; expected none"):
        open_dataset("voc2012", tmp_path, "train_aug")


@pytest.mark.parametrize("value", [21, 100, 254])
def test_a_value_above_20_is_refused_with_the_cause(tmp_path: Path, value: int) -> None:
    trees.voc2012(tmp_path)
    path = tmp_path / VOC / "SegmentationClass" / "2007_000033.png"
    trees.save_palette_mask(path, trees.values_of(0, value, 255))
    message = (
        rf"2007_000033\.png: label values {value} are outside the table; expected 0 to 20, 255; .* shifted by one, .*"
        r"SegmentationObject/, which holds instances; use the files of SegmentationClass/"
    )
    with pytest.raises(BadFileError, match=message):
        VOC2012(tmp_path, "val")[0]


def test_labels_converted_to_colors_are_refused(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.save_image(tmp_path / VOC / "SegmentationClass" / "2007_000033.png")
    with pytest.raises(
        BadFileError, match=r"2007_000033\.png: a mask of mode RGB; .* converted to colors, .*; use the"
    ):
        VOC2012(tmp_path, "val")[0]


def test_a_faulty_label_of_sbd_is_named_and_nothing_is_left_converted(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.sbd(tmp_path)
    path = tmp_path / "benchmark_RELEASE" / "dataset" / "cls" / "2008_000003.mat"
    trees.save_sbd_mat(path, trees.values_of(0, 21))
    with pytest.raises(BadFileError, match=r"2008_000003\.mat: label values 21 are outside the table"):
        prepared(tmp_path)
    assert not (tmp_path / VOC / "SegmentationClassAug").exists()
    path.unlink()
    with pytest.raises(BadFileError, match=r"cls: no label map for 1 of 2 images, such as 2008_000003\.mat; expected"):
        conversion(tmp_path)


def test_a_name_of_sbd_that_leads_outside_is_never_written(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.sbd(tmp_path)
    trees.write_lines(tmp_path / "benchmark_RELEASE" / "dataset" / "val.txt", ["../../evil"])
    with pytest.raises(BadFileError, match=r"no label map for 1 of 2 images, such as \.\./\.\./evil\.mat"):
        conversion(tmp_path)


def test_missing_lists_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"val\.txt: no such file; .*; run caaseg data prepare voc2012 --root"):
        VOC2012(tmp_path, "val")
    trees.voc2012(tmp_path)
    (tmp_path / VOC / "SegmentationClassAug").mkdir()
    with pytest.raises(BadFileError, match=r"trainaug\.txt: no such file, but .*SegmentationClassAug exists; expected"):
        conversion(tmp_path)
    with pytest.raises(ValueError, match="voc2012 has no split 'test'; expected train or val or trainval or train_aug"):
        VOC2012(tmp_path, "test")
