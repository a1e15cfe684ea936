"""Every fault is found, and its file is named."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from caaseg.cli import main
from caaseg.data.datasets import pascal_context
from caaseg.data.datasets.coco_stuff import conversion_10k
from caaseg.data.prepare.check import check
from caaseg.data.prepare.convert import convert
from tests.data import trees
from tests.data.datasets.test_coco_stuff import quiet
from tests.data.trees import CAMVID

needs_camvid = pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")


def faults_of(name: str, root: Path) -> list[tuple[str, str]]:
    """File and problem of each fault but the official counts, which small trees never have."""
    faults = check(name, root, quiet).faults
    return [(fault.file.name, fault.problem) for fault in faults if "official number" not in fault.problem]


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["data", "check", *words, "--json", "-"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


@needs_camvid
def test_camvid_is_without_fault(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown = checked(capsys, "camvid", "--root", str(CAMVID))
    assert code == 0
    assert {split: content["images"] for split, content in found["splits"].items()} == {
        "train": 367,
        "val": 101,
        "test": 233,
    }
    assert found["faults"] == []
    assert found["splits"]["train"]["pixels"]["Road"] == 20076880
    assert found["splits"]["val"]["pixels"]["Bicyclist"] == 387010
    assert found["splits"]["test"]["ignored_pixels"] == 1543383
    assert "no fault" in shown


@needs_camvid
def test_a_truncated_image_a_value_and_a_size_in_camvid_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "camvid"
    shutil.copytree(CAMVID, root, copy_function=os.symlink)
    truncated = sorted((root / "train").iterdir())[100]
    content = truncated.read_bytes()
    truncated.unlink()
    truncated.write_bytes(content[: len(content) // 2])
    value, size = sorted((root / "valannot").iterdir())[50], sorted((root / "testannot").iterdir())[7]
    for path, change in ((value, 42), (size, None)):
        with Image.open(path) as mask:
            values = np.array(mask)
        path.unlink()
        if change is None:
            trees.save_mask(path, values[:-1])
        else:
            values[100, 100] = change
            trees.save_mask(path, values)
    code, found, shown = checked(capsys, "camvid", "--root", str(root))
    assert code == 2
    assert {fault["file"] for fault in found["faults"]} == {str(truncated), str(value), str(size)}
    for path in (truncated, value, size):
        assert str(path) in shown
    assert "3 faults" in shown
    assert "label values 42 are outside the table; expected 0 to 11" in shown
    assert "the mask is 480 x 359 and its image" in shown


def test_small_trees_of_every_layout_have_no_fault_but_their_counts(tmp_path: Path) -> None:
    trees.camvid(tmp_path / "camvid")
    trees.cityscapes(tmp_path / "cityscapes")
    trees.coco_stuff_164k(tmp_path / "coco_stuff_164k")
    for name in ("camvid", "cityscapes", "coco_stuff_164k"):
        assert faults_of(name, tmp_path / name) == []
        findings = check(name, tmp_path / name, quiet)
        problems = [fault.problem for fault in findings.faults]
        assert len(problems) == len(findings.splits)
        assert all("expected" in problem and "the official number" in problem for problem in problems)


def test_the_histogram_counts_labelled_and_ignored_pixels(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path)
    train, val, test = check("cityscapes", tmp_path, quiet).splits
    assert (train.images, train.expected) == (4, 2975)
    assert train.pixels[[0, 18]].tolist() == [4 * 48, 4 * 48]
    assert (train.pixels.sum(), train.ignored) == (4 * 96, 4 * 96)
    assert (test.images, test.pixels.sum(), test.ignored) == (2, 0, 0)
    assert val.images == 2


def test_missing_partners_and_files_of_no_pair_are_named(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    (tmp_path / "trainannot" / "0001TP_train0.png").unlink()
    (tmp_path / "val" / "0001TP_val1.png").unlink()
    trees.save_picture(tmp_path / "test" / "unlisted.jpg")
    trees.save_mask(tmp_path / "testannot" / "unlisted.png", trees.values_of(0))
    (tmp_path / "test" / "Thumbs.db").write_bytes(b"")
    found = faults_of("camvid", tmp_path)
    assert [name for name, _ in found] == ["0001TP_train0.png", "0001TP_val1.png", "unlisted.jpg", "unlisted.png"]
    assert "no such file; expected a mask" in found[0][1]
    assert "no such file; expected an image" in found[1][1]
    assert "belongs to no pair" in found[2][1]


def test_extra_labels_are_named_in_every_layout(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path / "cityscapes")
    trees.coco_stuff_164k(tmp_path / "coco_stuff_164k")
    trees.coco_stuff_10k(tmp_path / "coco_stuff_10k")
    trees.voc2010(tmp_path / "pascal_context")
    trees.context_mat(tmp_path / "pascal_context", trees.values_of(0, 2))
    for name, make in (("coco_stuff_10k", conversion_10k), ("pascal_context", pascal_context.conversion)):
        todo = make(tmp_path / name)
        assert todo is not None
        convert(todo, quiet)
    extra = {
        "cityscapes": "gtFine/val/lindau/lindau_000000_000009_gtFine_labelIds.png",
        "coco_stuff_164k": "annotations/train2017/000000009999.png",
        "coco_stuff_10k": "labels/COCO_train2014_000000009999.png",
        "pascal_context": "VOCdevkit/VOC2010/SegmentationClassContext/2009_000001.png",
    }
    for name, path in extra.items():
        assert faults_of(name, tmp_path / name) == []
        trees.save_mask(tmp_path / name / path, trees.values_of(0))
        ((file, problem),) = faults_of(name, tmp_path / name)
        assert file == Path(path).name
        assert "belongs to no pair; expected a partner of the same name, in a split; remove it" in problem


def test_a_list_that_is_missing_is_a_fault_and_the_other_splits_are_read(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    (tmp_path / "val.txt").unlink()
    findings = check("camvid", tmp_path, quiet)
    assert [found.split for found in findings.splits] == ["train", "test"]
    assert "val.txt: no such file" in findings.faults[0].problem


def test_a_folder_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcdefgh":
        trees.save_picture(tmp_path / "images" / f"{name}.jpg")
        trees.save_mask(tmp_path / "masks" / f"{name}.png", trees.values_of(0, 1))
    (tmp_path / "classes.yaml").write_text("classes: [grass, 'tree [tall]']")
    code, found, shown = checked(capsys, "folder", "--root", str(tmp_path))
    assert code == 0
    assert {split: content["images"] for split, content in found["splits"].items()} == {"train": 7, "val": 1}
    assert "tree [tall]" in shown
    (tmp_path / "images" / "a.jpg").write_bytes(b"not an image")
    (tmp_path / "masks" / "b.png").unlink()
    trees.save_mask(tmp_path / "masks" / "lonely.png", trees.values_of(0))
    code, found, shown = checked(capsys, "folder", "--root", str(tmp_path))
    assert code == 2
    assert {Path(fault["file"]).name for fault in found["faults"]} == {"a.jpg", "b.png", "lonely.png"}


def test_a_folder_without_named_classes_has_all_its_faults_found(tmp_path: Path) -> None:
    for name in "abcdefgh":
        trees.save_picture(tmp_path / "images" / f"{name}.jpg")
        trees.save_mask(tmp_path / "masks" / f"{name}.png", trees.values_of(0, 1))
    for name in "bd":
        (tmp_path / "masks" / f"{name}.png").write_bytes(b"not a mask")
    trees.picture(0).save(tmp_path / "masks" / "f.png")
    assert sorted(name for name, _ in faults_of("folder", tmp_path)) == ["b.png", "d.png", "f.png"]
    for name in "aceghbd":
        trees.picture(0).save(tmp_path / "masks" / f"{name}.png")
    (fault,) = check("folder", tmp_path, quiet).faults  # none can be read: said once
    assert "a mask of mode RGB" in fault.problem


def test_an_image_in_two_splits_of_a_folder_is_one_fault_and_the_others_are_found(tmp_path: Path) -> None:
    for name in "abcd":
        trees.save_picture(tmp_path / "images" / f"{name}.jpg")
        trees.save_mask(tmp_path / "masks" / f"{name}.png", trees.values_of(0, 1))
    trees.write_lines(tmp_path / "train.txt", ["a", "b", "c"])
    trees.write_lines(tmp_path / "val.txt", ["c.jpg", "d"])
    (tmp_path / "masks" / "d.png").unlink()
    findings = check("folder", tmp_path, quiet)
    leaked, missing = findings.faults
    assert f"{tmp_path}: images in both train.txt and val.txt: c; expected each in one split" in leaked.problem
    assert "remove each from one of the two" in leaked.problem
    assert "d.png: no such file" in missing.problem
    assert [found.images for found in findings.splits] == [3, 2]


def test_a_folder_of_one_image_has_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.save_picture(tmp_path / "images" / "a.jpg")
    trees.save_mask(tmp_path / "masks" / "a.png", trees.values_of(0, 1))
    code, found, shown = checked(capsys, "folder", "--root", str(tmp_path))
    assert code == 2
    (fault,) = found["faults"]
    assert fault["split"] == "train"
    assert "one image: train has none" in shown
    assert "give at least two images, or name those of each split in train.txt and val.txt" in shown


def test_a_folder_without_masks_has_one_fault(tmp_path: Path) -> None:
    trees.save_picture(tmp_path / "images" / "a.jpg")
    trees.save_picture(tmp_path / "masks" / "a.jpg")
    (fault,) = check("folder", tmp_path, quiet).faults
    assert "masks: no masks found, only other files (1 .jpg)" in fault.problem


def test_the_command_writes_its_file_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.camvid(tmp_path / "camvid")
    target = tmp_path / "found.json"
    assert main(["data", "check", "camvid", "--root", str(tmp_path / "camvid"), "--json", str(target)]) == 2
    assert json.loads(target.read_text())["splits"]["train"]["official"] == 367
    assert f"numbers: {target}" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.camvid(tmp_path)
    main(["data", "check", "camvid", "--root", str(tmp_path)])
    assert "checking camvid" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    main(["data", "check", "camvid", "--root", str(tmp_path)])
    assert "checking camvid" in capsys.readouterr().out


def test_a_root_that_is_not_there_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = checked(capsys, "camvid", "--root", str(tmp_path / "none"))
    assert code == 2
    assert len(found["faults"]) == 3
    assert main(["data", "check", "folder", "--root", str(tmp_path / "none")]) == 2
    assert "images: no such folder; expected images/ and masks/" in capsys.readouterr().err
