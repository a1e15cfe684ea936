"""PASCAL Context from its three kinds of labels, under both protocols."""

import json
import re
from pathlib import Path

import pytest

from caaseg.data.datasets.pascal_context import CLASSES, PascalContext, conversion
from caaseg.data.prepare.convert import convert
from caaseg.data.sample import IGNORE, BadFileError
from tests.data import trees

VALUES = trees.values_of(0, 2, 458, 431, 1, 284)  # unlabeled, aeroplane, wood, "unknown", not one of the 59, person


def prepared(root: Path) -> None:
    todo = conversion(root)
    assert todo is not None
    convert(todo, trees.no_progress)


@pytest.mark.parametrize("source", ["mat", "json"])
def test_both_protocols_read_both_sources(tmp_path: Path, source: str) -> None:
    trees.voc2010(tmp_path)
    if source == "mat":
        trees.context_mat(tmp_path, VALUES)
    else:
        trees.context_json(tmp_path, VALUES)
    prepared(tmp_path)
    assert conversion(tmp_path) is None  # already converted
    for split, number in (("train", 2), ("val", 1)):
        with_59, with_60 = PascalContext(tmp_path, split), PascalContext(tmp_path, split, protocol=60)
        assert len(with_59) == len(with_60) == number
        assert with_59[0].label[0, :6].tolist() == [IGNORE, 0, 58, IGNORE, IGNORE, 36]
        assert with_60[0].label[0, :6].tolist() == [0, 1, 59, 0, 0, 37]
        assert (len(with_59.classes), len(with_60.classes)) == (59, 60)
        assert (with_59.classes[36], with_60.classes[37], with_60.classes[0]) == ("person", "person", "background")
        assert len(with_59.palette) == 59
        assert len(set(with_60.palette)) == 60
        assert with_59.missing() == []
    source_text = (tmp_path / "VOCdevkit/VOC2010/ImageSets/SegmentationContext/source.txt").read_text()
    assert source_text == ("trainval/*.mat\n" if source == "mat" else "trainval_merged.json\n")


def test_converted_labels_are_read(tmp_path: Path) -> None:
    voc = tmp_path / "VOCdevkit" / "VOC2010"
    trees.save_image(voc / "JPEGImages" / "2008_000002.jpg")
    trees.save_mask(voc / "SegmentationClassContext" / "2008_000002.png", trees.values_of(0, 1, 59))
    trees.write_lines(voc / "ImageSets" / "SegmentationContext" / "train.txt", ["2008_000002"])
    assert conversion(tmp_path) is None
    assert PascalContext(tmp_path, "train")[0].label[0, :3].tolist() == [IGNORE, 0, 58]
    trees.save_mask(voc / "SegmentationClassContext" / "2008_000002.png", trees.values_of(0, 1, 60))
    with pytest.raises(BadFileError, match=r"000002\.png: label values 60 are outside the table; expected 0 to 59"):
        PascalContext(tmp_path, "train")[0]


def test_later_regions_cover_earlier_ones(tmp_path: Path) -> None:
    trees.voc2010(tmp_path)
    trees.context_json(tmp_path, VALUES)
    path = tmp_path / "VOCdevkit" / "VOC2010" / "trainval_merged.json"
    content = json.loads(path.read_text())
    everywhere = {"size": [12, 16], "counts": [0, 12 * 16]}
    content["annos_segmentation"].append({"image_id": 2010000001, "category_id": 9, "segmentation": everywhere})
    path.write_text(json.dumps(content))
    prepared(tmp_path)
    assert trees.values_in(PascalContext(tmp_path, "val")[0].label) == [CLASSES.names.index("bag")]


@pytest.mark.parametrize("source", ["mat", "json"])
def test_an_id_outside_the_459_is_an_error(tmp_path: Path, source: str) -> None:
    trees.voc2010(tmp_path)
    values = trees.values_of(0, 2, 460)
    if source == "mat":
        trees.context_mat(tmp_path, values)
    else:
        trees.context_json(tmp_path, values)
    with pytest.raises(BadFileError, match=r"2008_000002.*: label values 460 are outside the table; expected 0 to 459"):
        prepared(tmp_path)
    assert not (tmp_path / "VOCdevkit" / "VOC2010" / "SegmentationClassContext").exists()
    with pytest.raises(BadFileError, match=r"train\.txt: no such file.*run caaseg data prepare pascal_context"):
        PascalContext(tmp_path, "train")


def test_missing_label_maps_and_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"trainval_merged\.json: no such file, and no directory .*trainval either"):
        conversion(tmp_path)
    trees.voc2010(tmp_path)
    trees.context_mat(tmp_path, VALUES)
    (tmp_path / "trainval" / "2008_000003.mat").unlink()
    message = re.escape("trainval: no label map for 1 of 3 images, such as 2008_000003.mat")
    with pytest.raises(BadFileError, match=message):
        conversion(tmp_path)


def test_a_name_that_leads_outside_is_never_written(tmp_path: Path) -> None:
    trees.voc2010(tmp_path)
    trees.context_mat(tmp_path, VALUES)
    trees.write_lines(tmp_path / "VOCdevkit/VOC2010/ImageSets/Main/train.txt", ["../../evil"])
    with pytest.raises(BadFileError, match=r"no label map for 1 of 2 images, such as \.\./\.\./evil\.mat"):
        conversion(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"images": 3, "annos_segmentation": []}',
        '{"images": [{}], "annos_segmentation": []}',
        "[" * 99_999,
    ],
)
def test_an_invalid_json_file_is_reported(tmp_path: Path, content: str) -> None:
    path = tmp_path / "VOCdevkit" / "VOC2010" / "trainval_merged.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(BadFileError, match=r"trainval_merged\.json: not the labels of PASCAL in Detail"):
        conversion(tmp_path)


@pytest.mark.parametrize("counts", ["", "~~", "04", [1, -1], ["a"], None, [2**80]])
def test_a_damaged_region_names_its_image(tmp_path: Path, counts: object) -> None:
    trees.context_json(tmp_path, VALUES)
    path = tmp_path / "VOCdevkit" / "VOC2010" / "trainval_merged.json"
    content = json.loads(path.read_text())
    content["annos_segmentation"][0]["segmentation"]["counts"] = counts
    path.write_text(json.dumps(content))
    with pytest.raises(BadFileError, match=r"trainval_merged\.json.2008_000002: a damaged region"):
        prepared(tmp_path)
