"""Label exports of all annotation tools give the same masks, and invalid exports give an error message."""

import json
import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from caaseg.cli import main
from caaseg.data.catalogue import open_dataset, splits
from caaseg.data.datasets.pairs import read_names
from caaseg.data.importers import import_labels
from caaseg.data.importers.shapes import crosses_itself, polygon_mask
from caaseg.data.sample import IGNORE, BadFileError
from caaseg.errors import CaasegError
from tests.data import exports


@pytest.mark.parametrize("make", exports.EXPORTS, ids=lambda make: make.__name__)
def test_every_format_imports_to_the_same_masks(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    out = tmp_path / "data"
    result = import_labels(make(tmp_path / "export"), out)
    assert sum(result.counts.values()) == 10
    assert not result.faults
    found = {}
    for split in splits("folder", out):
        for sample in (dataset := open_dataset("folder", out, split)):  # type: ignore[attr-defined]
            found[Path(sample.name).name] = [dataset.classes[k] for k in sample.label.flatten().tolist()]
    for k, name in enumerate(exports.NAMES):
        expected = [exports.CLASSES[v] for v in exports.expected_label(k).reshape(-1).tolist()]
        if make is exports.voc:
            expected = ["train" if one == "road" else one for one in expected]
        assert found[name] == expected


@pytest.mark.parametrize("make", [exports.voc, exports.roboflow, exports.yolo], ids=lambda make: make.__name__)
def test_splits_of_an_export_become_splits_of_the_dataset(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    result = import_labels(make(tmp_path / "export"), tmp_path / "data")
    assert result.counts == {"train": 7, "val": 3}
    assert splits("folder", tmp_path / "data") == ("train", "val")


def test_labels_are_found_if_a_parent_directory_is_also_named_images(tmp_path: Path) -> None:
    result = import_labels(exports.yolo(tmp_path / "images" / "export"), tmp_path / "data")
    assert result.counts == {"train": 7, "val": 3}


def test_images_are_copied_byte_by_byte(tmp_path: Path) -> None:
    export = exports.coco(tmp_path / "export")
    import_labels(export, tmp_path / "data")
    for name in exports.NAMES:
        assert (tmp_path / "data/images" / f"{name}.jpg").read_bytes() == (
            export / "images" / f"{name}.jpg"
        ).read_bytes()


def edit(path: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_smaller_or_the_later_region_is_on_top(tmp_path: Path) -> None:
    export = exports.coco(tmp_path / "export")  # lists the car before the road
    import_labels(export, tmp_path / "area")
    import_labels(export, tmp_path / "order", overlaps="order")
    by_area, by_order = (np.array(Image.open(tmp_path / way / "masks/photo0.png")) for way in ("area", "order"))
    assert (by_area[12, 6], by_order[12, 6]) == (1, 2)


def forget_coco(export: Path) -> None:
    images = json.loads((export / "labels.json").read_text())["images"]
    gone = next(image["id"] for image in images if "photo1" in image["file_name"])

    def remove(content: dict[str, Any]) -> None:
        content["annotations"] = [one for one in content["annotations"] if one["image_id"] != gone]

    edit(export / "labels.json", remove)


def forget_yolo(export: Path) -> None:
    (labels,) = export.rglob("photo1.txt")
    labels.unlink()


def forget_cvat(export: Path) -> None:
    (file,) = export.rglob("*.xml")
    tree = ElementTree.parse(file)
    (image,) = [image for image in tree.iter("image") if "photo1" in image.get("name", "")]
    for shape in list(image):
        image.remove(shape)
    tree.write(file)


@pytest.mark.parametrize(
    ("write", "forget"), [(exports.coco, forget_coco), (exports.yolo, forget_yolo), (exports.cvat, forget_cvat)]
)
def test_images_without_annotations_are_left_out_in_every_format(
    write: Callable[[Path], Path], forget: Callable[[Path], None], tmp_path: Path
) -> None:
    export = write(tmp_path / "export")
    forget(export)
    result = import_labels(export, tmp_path / "data")
    assert [path.stem for path in result.unlabeled] == ["photo1"]
    assert not list((tmp_path / "data").rglob("photo1.*"))
    assert sum(result.counts.values()) == 9


def test_unlabeled_pixels_can_be_ignored_or_have_a_class_of_their_own(tmp_path: Path) -> None:
    export = exports.coco(tmp_path / "export")
    assert import_labels(export, tmp_path / "a", unlabeled="ignore").classes == ("car", "road")
    assert np.array(Image.open(tmp_path / "a/masks/photo0.png"))[0, 0] == IGNORE
    assert import_labels(export, tmp_path / "b", unlabeled="sky").classes == ("sky", "car", "road")
    edit(export / "labels.json", lambda content: content["categories"].append({"id": 5, "name": "Background"}))
    assert import_labels(export, tmp_path / "c").classes == ("Background", "car", "road")


def break_missing(export: Path) -> None:
    (export / "images/photo3.jpg").unlink()


def break_class(export: Path) -> None:
    edit(export / "labels.json", lambda content: content["annotations"][4].update(category_id=99))


def break_polygon(export: Path) -> None:
    bow_tie = [[2.0, 2, 20, 20, 20, 2, 2, 20]]
    edit(export / "labels.json", lambda content: content["annotations"][4].update(segmentation=bow_tie))


def break_rle(export: Path) -> None:
    rle = {"size": [exports.HEIGHT, exports.WIDTH], "counts": [10, 20]}
    edit(export / "labels.json", lambda content: content["annotations"][4].update(segmentation=rle))


def break_box(export: Path) -> None:
    edit(export / "labels.json", lambda content: content["annotations"][4].update(segmentation=[]))


def break_size(export: Path) -> None:
    edit(export / "labels.json", lambda content: content["images"][4].update(width=999))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            break_missing,
            r"labels\.json: no such image file: 'photo3\.jpg'; searched .*; give its directory",
        ),
        (break_class, r"annotation \d+ of photo7\.jpg: the class 'category 99' is not in .*; expected background, car"),
        (break_polygon, r"annotation \d+ of photo7\.jpg: a polygon crosses itself, so that"),
        (break_rle, r"annotation \d+ of photo7\.jpg: run lengths add up to 30 pixels; expected 24 x 32 = 768"),
        (break_box, r"annotation \d+ of photo7\.jpg: no segmentation, only a bounding box; expected polygons or"),
        (break_size, r"photo4\.jpg: 32 x 24 pixels, but 999 x 24 in the export; expected the image that was labeled"),
    ],
)
def test_a_faulty_image_stops_the_import_or_is_left_out(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    export = exports.coco(tmp_path / "export")
    damage(export)
    with pytest.raises(BadFileError, match=f"{message}.*; --skip-faulty imports the other images"):
        import_labels(export, tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]  # nothing half-written
    result = import_labels(export, tmp_path / "data", skip_faulty=True)
    assert len(result.faults) == 1
    assert re.search(message, result.faults[0])
    assert result.counts == {"": 9}
    assert len(list((tmp_path / "data/masks").glob("*.png"))) == 9


def test_faults_of_the_other_formats_name_the_file_and_the_problem(tmp_path: Path) -> None:
    yolo = exports.yolo(tmp_path / "yolo")
    (yolo / "labels/train/photo0.txt").write_text("7 0 0 1 0 1 1\n")
    (yolo / "labels/train/photo1.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    cvat = exports.cvat(tmp_path / "cvat")
    xml = (cvat / "annotations.xml").read_text()
    (cvat / "annotations.xml").write_text(xml.replace('rle="0, 392"', 'rle="0, 5"', 1))
    start, _, end = (cvat / "annotations.xml").read_text().rpartition('label="car"')
    (cvat / "annotations.xml").write_text(f'{start}label="cart"{end}')
    roboflow = exports.roboflow(tmp_path / "roboflow")
    Image.new("L", (exports.WIDTH, exports.HEIGHT), 77).save(roboflow / "train/photo0_mask.png")
    (roboflow / "train/photo1_mask.png").unlink()
    studio = exports.label_studio(tmp_path / "studio")
    tasks = json.loads((studio / "project.json").read_text())
    brush = tasks[2]["annotations"][0]["result"][1]["value"]
    brush["rle"] = brush["rle"][:9]
    (studio / "project.json").write_text(json.dumps(tasks))
    masks = exports.cvat_masks(tmp_path / "masks")
    (masks / "labelmap.txt").write_text("background:0,0,0::\nroad:0,200,10::\n")
    expected = {
        yolo: ["line 1: the class '7 .data.yaml has 0 to 1.' is", "line 1: a bounding box or an incomplete polygon"],
        cvat: ["run lengths that add up to 5 pixels; expected 28 x 14 = 392", "the class 'cart' is not in"],
        roboflow: [r"photo0_mask\.png: label values 77 are outside", r"photo1_mask\.png: no such file"],
        studio: ["task 2, region 2: run lengths that are truncated"],
        masks: [r"colors \(128, 64, 32\) are outside the color table"],
    }
    for export, messages in expected.items():
        with pytest.raises(BadFileError, match=messages[0]):
            import_labels(export, tmp_path / "data")
        if export is masks:
            continue
        faults = import_labels(export, tmp_path / f"{export.name}-data", skip_faulty=True).faults
        assert len(faults) == len(messages)
        for message in messages:
            assert any(re.search(message, fault) for fault in faults)


def test_names_may_differ_in_case_and_unicode_form_and_unlabeled_images_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = exports.labelme(tmp_path / "my export")
    decomposed = unicodedata.normalize("NFD", "Straße été")
    (image,) = export.rglob("photo0.jpg")
    image.rename(image.with_name(f"{decomposed}.JPG"))
    (file,) = export.rglob("photo0.json")
    edit(file, lambda content: content.update(imagePath="Straße été.jpg"))
    (forgotten,) = export.rglob("photo1.json")
    forgotten.unlink()
    assert main(["data", "import", str(export), "--out", str(tmp_path / "my data")]) == 0
    out = capsys.readouterr().out
    assert "images without annotations, left out: 1 (" in out
    assert "photo1.jpg" in out
    assert "Labelme: 9 images" in out
    assert f"caaseg data check folder --root '{tmp_path / 'my data'}'" in out
    assert (tmp_path / "my data/masks/Straße été.png").is_file()
    assert main(["data", "check", "folder", "--root", str(tmp_path / "my data")]) == 0


def test_an_import_overwrites_nothing(tmp_path: Path) -> None:
    export = exports.coco(tmp_path / "export")
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CaasegError, match="mine: already exists; expected a new directory"):
        import_labels(export, out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_directory_that_appears_during_the_import_is_not_overwritten(tmp_path: Path) -> None:
    export, out = exports.coco(tmp_path / "export"), tmp_path / "mine"

    def make_out(step: str, done: int, total: int | None) -> None:
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("mine")

    with pytest.raises(CaasegError, match="mine: another process wrote it during this import; nothing was"):
        import_labels(export, out, progress=make_out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_an_unknown_export_gets_a_message(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(BadFileError, match=r"export: not a known label export; expected any of coco, labelme"):
        import_labels(tmp_path / "export", tmp_path / "data")
    with pytest.raises(CaasegError, match=r"nowhere: no such file or directory; expected a label export"):
        import_labels(tmp_path / "nowhere", tmp_path / "data")
    (tmp_path / "export" / "a.json").write_text("{")
    with pytest.raises(BadFileError, match=r"a\.json: cannot be read as JSON \(.*\); export the labels again"):
        import_labels(tmp_path / "export", tmp_path / "data")


def test_names_in_an_export_never_leave_its_directories(tmp_path: Path) -> None:
    export = exports.coco(tmp_path / "export")
    exports.save_images(tmp_path / "secret", ".png")
    edit(export / "labels.json", lambda content: content["images"][0].update(file_name="../secret/photo0.png"))
    with pytest.raises(BadFileError, match=r"no such image file: '\.\./secret/photo0\.png'"):
        import_labels(export / "labels.json", tmp_path / "data", images=export / "images")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("file_name", [3, None, ["a.jpg"], {"a": 1}])
def test_values_of_other_types_are_one_message(tmp_path: Path, file_name: object) -> None:
    export = exports.coco(tmp_path / "export")
    edit(export / "labels.json", lambda content: content["images"][0].update(file_name=file_name))
    with pytest.raises(BadFileError, match=r"export: damaged, or not in the format coco \(.*\); export the"):
        import_labels(export, tmp_path / "data")


def test_a_run_length_beyond_64_bits_is_one_message(tmp_path: Path) -> None:
    export = exports.coco_masks(tmp_path / "export")
    edit(export / "labels.json", lambda content: content["annotations"][0]["segmentation"].update(counts=[10**30]))
    with pytest.raises(BadFileError, match=r"annotation 19 of photo9\.jpg: .*; correct it in the annotation tool"):
        import_labels(export, tmp_path / "data")


def test_pipes_are_not_read(tmp_path: Path) -> None:
    for name in ("a.json", "a.xml", "a.yaml", "_classes.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(BadFileError, match="not a known label export"):
        import_labels(tmp_path, tmp_path / "data")
    os.mkfifo(tmp_path / "train.txt")
    with pytest.raises(BadFileError, match=r"train\.txt: cannot be read as a list of names \(not a regular file\)"):
        read_names(tmp_path / "train.txt", "write it")


def test_nested_aliases_in_a_yolo_file_take_no_memory(tmp_path: Path) -> None:
    export = exports.yolo(tmp_path / "export")
    aliases = "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))
    (export / "data.yaml").write_text(f"a0: &a0 [x, x]\n{aliases}names: [*a39]\n")
    with pytest.raises(BadFileError, match="not a known label export"):
        import_labels(export, tmp_path / "data")


def test_a_class_that_no_file_can_store_is_refused(tmp_path: Path) -> None:
    export = exports.coco(tmp_path / "export")
    edit(export / "labels.json", lambda content: content["categories"][0].update(name="\ud800"))
    with pytest.raises(BadFileError, match=r"the class '\\ud800' is not valid Unicode; rename it"):
        import_labels(export, tmp_path / "data")


points = st.tuples(st.floats(-4, 20), st.floats(-4, 20))


@given(polygon=st.lists(points, min_size=3, max_size=3))
def test_a_triangle_contains_the_pixels_whose_centers_are_on_the_same_side_of_all_edges(
    polygon: list[tuple[float, float]],
) -> None:
    mask = polygon_mask(polygon, 16, 12)
    x, y = np.meshgrid(np.arange(12) + 0.5, np.arange(16) + 0.5)
    sides = []
    for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        sides.append((x1 - x0) * (y - y0) - (y1 - y0) * (x - x0))
    distances = np.abs(np.stack(sides)).min(0)
    inside = np.logical_or((np.stack(sides) > 0).all(0), (np.stack(sides) < 0).all(0))
    clear = distances > 1e-6  # centers on an edge may belong to either side
    np.testing.assert_array_equal(mask[clear], inside[clear])


def test_a_polygon_that_touches_itself_is_accepted_and_one_that_crosses_itself_is_not() -> None:
    square = np.array([(0, 0), (4, 0), (4, 4), (0, 4)], dtype=np.float64)
    assert not crosses_itself(square)
    assert crosses_itself(square[[0, 2, 1, 3]])
    touching = np.array([(0, 0), (4, 0), (4, 4), (2, 0), (0, 4)], dtype=np.float64)
    assert not crosses_itself(touching)
    with pytest.raises(ValueError, match="at least three points"):
        polygon_mask([(0, 0), (1, 1)], 4, 4)


def test_data_import_prints_the_format_and_the_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = exports.coco(tmp_path / "export")
    assert main(["data", "import", str(export), "--out", str(tmp_path / "data")]) == 0
    assert "COCO JSON: 10 images, 3 classes (background, car, road)" in capsys.readouterr().out
    assert main(["data", "check", "folder", "--root", str(tmp_path / "data")]) == 0
    capsys.readouterr()
    assert main(["data", "import", str(export), "--out", str(tmp_path / "data")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["data", "import", str(export), "--out", str(tmp_path / "b"), "--format", "cvat"]) == 2
    assert "not a known label export; expected an export in the format cvat" in capsys.readouterr().err
