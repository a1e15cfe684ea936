"""`check` finds every problem and names its file."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from caaseg.cli import main
from caaseg.data.datasets import pascal_context, voc2012
from caaseg.data.datasets.coco_stuff import conversion_10k
from caaseg.data.prepare.check import check
from caaseg.data.prepare.convert import convert
from tests.data import trees
from tests.data.trees import CAMVID

needs_camvid = pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")


def problems_of(name: str, root: Path) -> list[tuple[str, str]]:
    """Return file and message of each problem except official counts, which small trees never have."""
    problems = check(name, root, trees.no_progress).problems
    return [(p.file.name, p.message) for p in problems if "official number" not in p.message]


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main(["data", "check", *arguments, "--json", "-"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


@needs_camvid
@pytest.mark.slow
def test_camvid_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
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
    for split in ("train", "val", "test"):
        names = (CAMVID / f"{split}.txt").read_text().split()[:3]
        trees.write_lines(root / f"{split}.txt", [Path(name).stem for name in names])
        for directory in (split, f"{split}annot"):
            (root / directory).mkdir()
            for name in names:
                for path in (CAMVID / directory).glob(f"{Path(name).stem}.*"):
                    shutil.copy(path, root / directory)
    truncated = sorted((root / "train").iterdir())[1]
    content = truncated.read_bytes()
    truncated.write_bytes(content[: len(content) // 2])
    value, size = sorted((root / "valannot").iterdir())[1], sorted((root / "testannot").iterdir())[2]
    for path, change in ((value, 42), (size, None)):
        with Image.open(path) as mask:
            values = np.array(mask)
        if change is None:
            trees.save_mask(path, values[:-1])
        else:
            values[100, 100] = change
            trees.save_mask(path, values)
    code, found, shown = checked(capsys, "camvid", "--root", str(root))
    assert code == 2
    files = {fault["file"] for fault in found["faults"] if "official number" not in fault["problem"]}
    assert files == {str(truncated), str(value), str(size)}
    for path in (truncated, value, size):
        assert str(path) in shown
    assert "6 faults" in shown  # and three official counts
    assert "label values 42 are outside the table; expected 0 to 11" in shown
    assert "the mask is 480 x 359 and its image" in shown


def test_small_trees_of_every_layout_differ_only_in_their_counts(tmp_path: Path) -> None:
    trees.camvid(tmp_path / "camvid")
    trees.cityscapes(tmp_path / "cityscapes")
    trees.coco_stuff_164k(tmp_path / "coco_stuff_164k")
    trees.ade20k(tmp_path / "ade20k")
    trees.voc2012(tmp_path / "voc2012")
    for name in ("camvid", "cityscapes", "coco_stuff_164k", "ade20k", "voc2012"):
        assert problems_of(name, tmp_path / name) == []
        result = check(name, tmp_path / name, trees.no_progress)
        problems = [problem.message for problem in result.problems]
        assert len(problems) == len(result.splits)
        assert all("expected" in problem and "the official number" in problem for problem in problems)


def test_the_histogram_counts_labeled_and_ignored_pixels(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path)
    train, val, test = check("cityscapes", tmp_path, trees.no_progress).splits
    assert (train.images, train.expected) == (4, 2975)
    assert train.pixels[[0, 18]].tolist() == [4 * 48, 4 * 48]
    assert (train.pixels.sum(), train.ignored) == (4 * 96, 4 * 96)
    assert (test.images, test.pixels.sum(), test.ignored) == (2, 0, 0)
    assert val.images == 2


def test_pixels_of_pairs_with_a_problem_are_not_counted(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    expected = check("camvid", tmp_path, trees.no_progress).splits[0]
    (tmp_path / "train" / "0001TP_train0.png").write_bytes(b"not an image")
    trees.save_mask(tmp_path / "trainannot" / "0001TP_train1.png", trees.values_of(0, 5, 10, 11, height=4))
    train = check("camvid", tmp_path, trees.no_progress).splits[0]
    assert (train.pixels.sum(), train.ignored) == (3 * 48, 48)  # one pair of three is left
    assert (expected.pixels.sum(), expected.ignored) == (3 * 3 * 48, 3 * 48)


def test_missing_images_missing_masks_and_unused_files_are_named(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    (tmp_path / "trainannot" / "0001TP_train0.png").unlink()
    (tmp_path / "val" / "0001TP_val1.png").unlink()
    trees.save_image(tmp_path / "test" / "unlisted.jpg")
    trees.save_mask(tmp_path / "testannot" / "unlisted.png", trees.values_of(0))
    (tmp_path / "test" / "Thumbs.db").write_bytes(b"")
    found = problems_of("camvid", tmp_path)
    assert [name for name, _ in found] == ["0001TP_train0.png", "0001TP_val1.png", "unlisted.jpg", "unlisted.png"]
    assert "no such file; expected a mask" in found[0][1]
    assert "no such file; expected an image" in found[1][1]
    assert "is not used in any split" in found[2][1]


def test_extra_labels_are_named_in_every_layout(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path / "cityscapes")
    trees.coco_stuff_164k(tmp_path / "coco_stuff_164k")
    trees.coco_stuff_10k(tmp_path / "coco_stuff_10k")
    trees.voc2010(tmp_path / "pascal_context")
    trees.context_mat(tmp_path / "pascal_context", trees.values_of(0, 2))
    trees.ade20k(tmp_path / "ade20k")
    trees.voc2012(tmp_path / "voc2012")
    for name, make in (("coco_stuff_10k", conversion_10k), ("pascal_context", pascal_context.conversion)):
        todo = make(tmp_path / name)
        assert todo is not None
        convert(todo, trees.no_progress)
    extra = {
        "cityscapes": "gtFine/val/lindau/lindau_000000_000009_gtFine_labelIds.png",
        "coco_stuff_164k": "annotations/train2017/000000009999.png",
        "coco_stuff_10k": "labels/COCO_train2014_000000009999.png",
        "pascal_context": "VOCdevkit/VOC2010/SegmentationClassContext/2009_000001.png",
        "ade20k": "annotations/validation/ADE_val_00000009.png",
        "voc2012": "VOCdevkit/VOC2012/SegmentationClass/2009_000001.png",
    }
    for name, path in extra.items():
        assert problems_of(name, tmp_path / name) == []
        trees.save_mask(tmp_path / name / path, trees.values_of(0))
        ((file, problem),) = problems_of(name, tmp_path / name)
        assert file == Path(path).name
        assert "is not used in any split; expected an image and a mask of the same name; add the" in problem


def test_faults_of_ade20k_are_named_with_their_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.ade20k(tmp_path)
    labels = tmp_path / "annotations"
    trees.save_mask(labels / "training" / "ADE_train_00000001.png", trees.values_of(0, 7, 149, 255))  # shifted
    (labels / "training" / "ADE_train_00000003.png").unlink()
    (tmp_path / "images" / "validation" / "ADE_val_00000001.jpg").unlink()
    trees.save_mask(labels / "validation" / "ADE_val_00000002.png", trees.values_of(0, 1))
    code, found, shown = checked(capsys, "ade20k", "--root", str(tmp_path))
    assert code == 2
    problems = {Path(fault["file"]).name: fault["problem"] for fault in found["faults"]}
    assert sorted(problems) == sorted(
        [f"ADE_{name}.png" for name in ("train_00000001", "train_00000003", "val_00000001", "val_00000002")]
        + [tmp_path.name]
    )
    assert "label values 255 are outside the table; expected 0 to 150; the label was probably shifted by one" in shown
    assert "no such file; expected a mask" in problems["ADE_train_00000003.png"]
    assert "is not used in any split; expected" in problems["ADE_val_00000001.png"]
    assert "the mask is 16 x 12 and its image ADE_val_00000002.jpg 3 x 2" in problems["ADE_val_00000002.png"]
    assert "1 images in split val; expected 2000, the official number" in shown


def test_faults_of_voc2012_are_named_once_with_their_causes(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.sbd(tmp_path)
    todo = voc2012.conversion(tmp_path)
    assert todo is not None
    convert(todo, trees.no_progress)
    assert problems_of("voc2012", tmp_path) == []
    voc = tmp_path / "VOCdevkit" / "VOC2012"
    trees.save_palette_mask(voc / "SegmentationClass" / "2007_000032.png", trees.values_of(1, 21, 255))
    (voc / "JPEGImages" / "2007_000033.jpg").unlink()
    (voc / "SegmentationClassAug" / "2008_000002.png").unlink()
    trees.save_mask(voc / "SegmentationClassAug" / "2008_000003.png", trees.values_of(0, 22))
    found = dict(problems_of("voc2012", tmp_path))
    assert list(found) == ["2007_000032.png", "2007_000033.jpg", "2008_000002.png", "2008_000003.png"]
    assert (
        "label values 21 are outside the table; expected 0 to 20, 255; the label was probably shifted by one"
        in (found["2007_000032.png"])
    )
    assert "no such file; expected an image" in found["2007_000033.jpg"]
    assert "no such file; expected a mask" in found["2008_000002.png"]
    assert "label values 22 are outside the table" in found["2008_000003.png"]
    result = check("voc2012", tmp_path, trees.no_progress)
    assert [(split.split, split.images, split.expected) for split in result.splits] == [
        ("train", 2, 1464),
        ("val", 1, 1449),
        ("trainval", 3, 2913),
        ("train_aug", 4, 10582),
    ]
    assert [int(split.pixels.sum()) for split in result.splits] == [144, 0, 144, 144]  # of pairs without a problem


def test_sbd_that_is_not_converted_is_a_problem_of_train_aug(tmp_path: Path) -> None:
    trees.voc2012(tmp_path)
    trees.sbd(tmp_path)
    ((file, problem),) = problems_of("voc2012", tmp_path)
    assert file == tmp_path.name
    assert "trainaug.txt: no such file; expected the split's list of names; run caaseg data prepare voc2012" in problem


def test_a_missing_list_is_a_problem_and_the_other_splits_are_read(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    (tmp_path / "val.txt").unlink()
    result = check("camvid", tmp_path, trees.no_progress)
    assert [found.split for found in result.splits] == ["train", "test"]
    assert "val.txt: no such file" in result.problems[0].message


def test_a_folder_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcdefgh":
        trees.save_image(tmp_path / "images" / f"{name}.jpg")
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


def test_all_problems_of_a_folder_without_classes_yaml_are_found(tmp_path: Path) -> None:
    for name in "abcdefgh":
        trees.save_image(tmp_path / "images" / f"{name}.jpg", height=40, width=40)
        trees.save_mask(tmp_path / "masks" / f"{name}.png", trees.values_of(0, 1, height=40, width=40))
    for name in "bd":
        (tmp_path / "masks" / f"{name}.png").write_bytes(b"not a mask")
    trees.make_image(0, 40, 40).save(tmp_path / "masks" / "f.png")
    assert sorted(name for name, _ in problems_of("folder", tmp_path)) == ["b.png", "d.png", "f.png"]
    for name in "aceghbd":
        trees.make_image(0, 40, 40).save(tmp_path / "masks" / f"{name}.png")
    (problem,) = check("folder", tmp_path, trees.no_progress).problems  # no mask can be read: reported once
    assert "different colors; expected one color per class" in problem.message


def test_an_image_in_two_splits_of_a_folder_is_one_problem(tmp_path: Path) -> None:
    for name in "abcd":
        trees.save_image(tmp_path / "images" / f"{name}.jpg")
        trees.save_mask(tmp_path / "masks" / f"{name}.png", trees.values_of(0, 1))
    trees.write_lines(tmp_path / "train.txt", ["a", "b", "c"])
    trees.write_lines(tmp_path / "val.txt", ["c.jpg", "d"])
    (tmp_path / "masks" / "d.png").unlink()
    result = check("folder", tmp_path, trees.no_progress)
    leaked, missing = result.problems
    assert f"{tmp_path}: images in both train.txt and val.txt: c; expected each in one split" in leaked.message
    assert "list each in one of the two" in leaked.message
    assert "d.png: no such file" in missing.message
    assert [found.images for found in result.splits] == [3, 2]


def test_a_folder_with_one_image_has_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.save_image(tmp_path / "images" / "a.jpg")
    trees.save_mask(tmp_path / "masks" / "a.png", trees.values_of(0, 1))
    code, found, shown = checked(capsys, "folder", "--root", str(tmp_path))
    assert code == 2
    (fault,) = found["faults"]
    assert fault["split"] == "train"
    assert "one image: train has none" in shown
    assert "add images, or list those of each split in train.txt and val.txt" in shown


def test_a_folder_without_masks_has_one_problem(tmp_path: Path) -> None:
    trees.save_image(tmp_path / "images" / "a.jpg")
    trees.save_image(tmp_path / "masks" / "a.jpg")
    (problem,) = check("folder", tmp_path, trees.no_progress).problems
    assert "masks: no masks found, only other files (1 .jpg)" in problem.message


def test_the_command_writes_its_json_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.camvid(tmp_path / "camvid")
    target = tmp_path / "found.json"
    assert main(["data", "check", "camvid", "--root", str(tmp_path / "camvid"), "--json", str(target)]) == 2
    assert json.loads(target.read_text())["splits"]["train"]["official"] == 367
    assert f"numbers: {target}" in capsys.readouterr().out


def test_a_terminal_shows_a_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.camvid(tmp_path)
    main(["data", "check", "camvid", "--root", str(tmp_path)])
    assert "checking camvid" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich assumes a terminal
    main(["data", "check", "camvid", "--root", str(tmp_path)])
    assert "checking camvid" in capsys.readouterr().out


def test_a_missing_root_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = checked(capsys, "camvid", "--root", str(tmp_path / "none"))
    assert code == 2
    assert len(found["faults"]) == 3
    assert main(["data", "check", "folder", "--root", str(tmp_path / "none")]) == 2
    assert "images: no such directory; expected images/ and masks/" in capsys.readouterr().err


def test_a_split_whose_pixels_are_all_ignored_is_a_problem(tmp_path: Path) -> None:
    for split, value in (("train", 1), ("val", 255)):
        for directory, pixels in (
            ("images", np.zeros((8, 8, 3), np.uint8)),
            ("masks", np.full((8, 8), value, np.uint8)),
        ):
            (tmp_path / directory / split).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / directory / split / "a.png")
    (tmp_path / "classes.yaml").write_text("classes: [wall, door]\nignore: [255]\n")
    message = f"{tmp_path}: split val has no labeled pixel: all are ignored; check the masks and their classes"
    assert problems_of("folder", tmp_path) == [(tmp_path.name, message)]
