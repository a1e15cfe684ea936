"""A directory of images and masks: splits, classes, and no silent guesses."""

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.cli import main
from caaseg.data.catalogue import open_dataset
from caaseg.data.datasets.folder import Folder, read_mask_classes, splits_in
from caaseg.data.datasets.mask_classes import MaskClasses
from caaseg.data.sample import IGNORE, BadFileError
from tests.data import trees

NAMES = [f"n{k:02d}" for k in range(20)]


def make(root: Path, *values: int, names: list[str] = NAMES, classes: str | None = None) -> Path:
    for name in names:
        trees.save_image(root / "images" / f"{name}.jpg")
        trees.save_mask(root / "masks" / f"{name}.png", trees.values_of(*values))
    if classes is not None:
        (root / "classes.yaml").write_text(classes)
    return root


def names_of(dataset: Folder) -> list[str]:
    return [pair.name for pair in dataset.pairs]


def test_a_seeded_fraction_becomes_val(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, classes="classes: [a, b]")
    assert splits_in(tmp_path) == ("train", "val")
    train, val = Folder(tmp_path, "train", val_fraction=0.25), Folder(tmp_path, "val", val_fraction=0.25)
    assert (len(train), len(val)) == (15, 5)
    assert sorted(names_of(train) + names_of(val)) == NAMES
    assert names_of(Folder(tmp_path, "val", val_fraction=0.25)) == names_of(val)
    assert names_of(Folder(tmp_path, "val", val_fraction=0.25, seed=1)) != names_of(val)
    make(tmp_path, 0, 1, names=["later"])
    moved = set(names_of(Folder(tmp_path, "val", val_fraction=0.25))) ^ set(names_of(val))
    assert len(moved) <= 2
    with pytest.raises(ValueError, match=r"val_fraction is 1\.5; expected a number between 0 and 1"):
        Folder(tmp_path, "val", val_fraction=1.5)
    with pytest.raises(ValueError, match="has no split 'test'; expected train or val"):
        Folder(tmp_path, "test")


def test_lists_define_the_splits_with_or_without_suffixes(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["a", "b", "c.v2", "d"], classes="classes: [x, y]")
    trees.write_lines(tmp_path / "train.txt", ["b", "c.v2"])
    trees.write_lines(tmp_path / "val.txt", ["a.jpg"])
    assert splits_in(tmp_path) == ("train", "val")
    assert names_of(Folder(tmp_path, "train")) == ["b", "c.v2"]
    assert names_of(Folder(tmp_path, "val")) == ["a"]
    assert trees.values_in(Folder(tmp_path, "val")[0].label) == [0, 1]
    trees.write_lines(tmp_path / "val.txt", ["nowhere"])
    assert [path.name for path in Folder(tmp_path, "val").missing()] == ["nowhere.jpg", "nowhere.png"]


def test_subdirectories_define_the_splits(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["train/a", "train/deeper/b", "val/a"], classes="classes: [x, y]")
    for k in range(2):
        trees.save_image(tmp_path / "images" / "test" / f"{k}.png")
    assert splits_in(tmp_path) == ("train", "val", "test")
    assert names_of(Folder(tmp_path, "train")) == ["train/a", "train/deeper/b"]
    assert names_of(Folder(tmp_path, "val")) == ["val/a"]
    test = Folder(tmp_path, "test")
    assert len(test) == 2
    assert trees.values_in(test[0].label) == [IGNORE]  # no masks
    trees.save_mask(tmp_path / "masks" / "test" / "0.png", trees.values_of(1))
    assert Folder(tmp_path, "test").missing() == [tmp_path / "masks" / "test" / "1.png"]


@pytest.mark.parametrize("again", ["b", "b.jpg", "./b"])
def test_an_image_in_two_lists_is_refused(tmp_path: Path, again: str) -> None:
    make(tmp_path, 0, 1, names=["a", "b", "c", "d"], classes="classes: [x, y]")
    trees.write_lines(tmp_path / "train.txt", ["a", "b"])
    trees.write_lines(tmp_path / "val.txt", [again, "c"])
    trees.write_lines(tmp_path / "test.txt", ["d"])
    for split in ("train", "val"):
        with pytest.raises(BadFileError, match=r"images in both train\.txt and val\.txt: b.*; expected.*; list each"):
            open_dataset("folder", tmp_path, split)
    assert len(open_dataset("folder", tmp_path, "test")) == 1
    trees.write_lines(tmp_path / "val.txt", ["c"])
    assert len(open_dataset("folder", tmp_path, "train")) == 2
    trees.write_lines(tmp_path / "test.txt", ["c"])  # val and test may overlap
    assert [len(open_dataset("folder", tmp_path, split)) for split in ("train", "val", "test")] == [2, 1, 1]
    (tmp_path / "val.txt").write_bytes(b"\xff")  # a problem of val, not of train
    assert len(open_dataset("folder", tmp_path, "train")) == 2


def test_a_list_without_train_txt_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["a", "b", "c"], classes="classes: [x, y]")
    trees.write_lines(tmp_path / "val.txt", ["a"])
    with pytest.raises(BadFileError, match=r"val\.txt: no train\.txt next to it; write one too"):
        open_dataset("folder", tmp_path, "train")


def test_links_to_training_images_are_the_same_images(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["train/a", "train/b"], classes="classes: [x, y]")
    for kind in ("images", "masks"):
        (tmp_path / kind / "val").symlink_to("train")
    with pytest.raises(
        BadFileError, match=r"images in both train and val: train/a \(val/a\), train/b \(val/b\); expected"
    ):
        open_dataset("folder", tmp_path, "val")


def test_a_split_without_images_is_reported(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["a"], classes="classes: [x, y]")
    with pytest.raises(BadFileError, match=r"one image: train has none, .*add images, or.* val\.txt"):
        open_dataset("folder", tmp_path, "train")
    assert len(open_dataset("folder", tmp_path, "val")) == 1  # a trained model may be evaluated on it
    make(tmp_path, 0, 1, names=["b"])
    with pytest.raises(BadFileError, match=r"2 images: train has none, because all are in val"):
        open_dataset("folder", tmp_path, "train", val_fraction=0.9)
    trees.write_lines(tmp_path / "train.txt", [])
    with pytest.raises(BadFileError, match=r"train\.txt: no names, so train has no images; expected one name per line"):
        open_dataset("folder", tmp_path, "train")


def test_directories_without_images_report_their_content(tmp_path: Path) -> None:
    make(tmp_path / "split", 0, 1, names=["train/a"], classes="classes: [x, y]")
    (tmp_path / "split" / "images" / "val").mkdir()
    with pytest.raises(
        BadFileError, match=r"images/val: no images found, the directory is empty; expected files that end"
    ):
        open_dataset("folder", tmp_path / "split", "val")
    make(tmp_path / "other", 0, 1, names=["a"], classes="classes: [x, y]")
    (tmp_path / "other" / "images" / "a.jpg").rename(tmp_path / "other" / "images" / "a.gif")
    with pytest.raises(BadFileError, match=r"images: no images found, only other files \(1 \.gif\); expected files"):
        open_dataset("folder", tmp_path / "other", "train")


def test_a_directory_without_masks_reports_its_content_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    with pytest.raises(
        BadFileError, match=r"masks: no masks found, the directory is empty;.*put images into.*none either"
    ):
        Folder(tmp_path, "train")
    trees.save_image(tmp_path / "images" / "a.jpg")
    for split in ("train", "val"):
        with pytest.raises(
            BadFileError, match=r"masks: no masks found, the directory is empty; expected.*; save the masks"
        ):
            Folder(tmp_path, split)
    trees.save_image(tmp_path / "masks" / "a.jpg")
    (tmp_path / "masks" / "notes.txt").write_text("")
    jpeg = r"masks: no masks found, only other files \(1 \.jpg, 1 \.txt\); .*JPEG changes the values.*again as PNG"
    with pytest.raises(BadFileError, match=jpeg):
        Folder(tmp_path, "train")
    (tmp_path / "classes.yaml").write_text("classes: [x, y]")  # also with named classes
    with pytest.raises(BadFileError, match=jpeg):
        Folder(tmp_path, "train")


def test_black_and_white_masks_are_two_classes_and_it_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 0, 255)
    with caplog.at_level(logging.WARNING):
        train, val = Folder(tmp_path, "train"), Folder(tmp_path, "val")
    assert train.classes == val.classes == ("background", "foreground")
    assert trees.values_in(train[0].label) == [0, 1]
    (record,) = caplog.records  # inferred once for all splits
    assert "the masks hold only 0 and 255: read as two classes" in record.getMessage()
    assert "with nothing ignored" in record.getMessage()


@pytest.mark.parametrize("modes", [["RGB"], ["RGBA"], ["LA"], ["L", "RGB", "RGBA", "LA"]])
@pytest.mark.parametrize("classes", [None, "classes: {background: 0, foreground: 255}"])
def test_black_and_white_in_colors_is_read_as_in_gray(tmp_path: Path, modes: list[str], classes: str | None) -> None:
    make(tmp_path, 0, 255, classes=classes)
    gray = Folder(tmp_path, "train")
    labels = [gray[k].label for k in range(len(gray))]
    for k, name in enumerate(NAMES):
        path = tmp_path / "masks" / f"{name}.png"
        with Image.open(path) as mask:
            mask.convert(modes[k % len(modes)]).save(path)
    colored = Folder(tmp_path, "train")
    assert colored.classes == gray.classes == ("background", "foreground")
    assert colored.palette == gray.palette
    read_label = pickle.loads(pickle.dumps(colored.read_label))  # as spawned workers get it
    for k, pair in enumerate(colored.pairs):
        assert colored[k].label.equal(labels[k])
        assert pair.label is not None
        np.testing.assert_array_equal(read_label(pair.label), labels[k])


def test_black_and_white_in_colors_among_class_ids_is_refused_never_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 0, 1)
    train = Folder(tmp_path, "train")
    path = train.pairs[0].label
    assert path is not None
    Image.fromarray(trees.values_of(0, 255).astype(np.uint8)).convert("RGB").save(path)
    caplog.clear()
    train = Folder(tmp_path, "train")
    assert train.classes == ("0", "1")
    assert "values 0, 1; nothing is ignored" in caplog.text
    with pytest.raises(BadFileError, match=r"a mask of mode RGB with the color \(255, .* in classes\.yaml"):
        train[0]


def test_a_transparent_black_and_white_mask_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 0, 255)
    for name in NAMES:
        Image.new("RGBA", (16, 12), (255, 255, 255, 0)).save(tmp_path / "masks" / f"{name}.png")
    with pytest.raises(BadFileError, match="a mask with transparent pixels; expected none"):
        Folder(tmp_path, "train")


def test_black_and_white_masks_under_names_alone_are_an_error_never_ignored(tmp_path: Path) -> None:
    make(tmp_path, 0, 255, classes="classes: [background, cat]")
    with pytest.raises(BadFileError, match=r"\.png: label values 255 are outside.*expected 0 to 1;.*add them to"):
        Folder(tmp_path, "train")[0]


def test_classes_yaml_can_define_255(tmp_path: Path) -> None:
    make(tmp_path, 0, 255, classes="classes: {background: 0, cat: 255}")
    assert Folder(tmp_path, "train").classes == ("background", "cat")
    assert trees.values_in(Folder(tmp_path, "train")[0].label) == [0, 1]
    (tmp_path / "classes.yaml").write_text("classes: [background]\nignore: [255]")
    assert trees.values_in(Folder(tmp_path, "train")[0].label) == [0, IGNORE]


def test_classes_of_index_masks_are_inferred_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 0, 1, 7, 255)
    dataset = Folder(tmp_path, "train")
    assert dataset.classes == ("0", "1", "7")
    assert trees.values_in(dataset[0].label) == [0, 1, 2, IGNORE]
    assert "found 3 classes in the masks, values 0, 1, 7; 255 is ignored; run caaseg data init" in caplog.text


def test_an_unreadable_mask_does_not_hide_the_others(tmp_path: Path) -> None:
    make(tmp_path, 0, 255)
    (tmp_path / "masks" / "n00.png").write_bytes(b"no mask")
    assert Folder(tmp_path, "train").classes == ("background", "foreground")
    samples = [*Folder(tmp_path, "train").pairs, *Folder(tmp_path, "val").pairs]
    assert tmp_path / "masks" / "n00.png" in [pair.label for pair in samples]


def test_classes_are_inferred_again_if_a_mask_changes(tmp_path: Path) -> None:
    make(tmp_path, 0, 1)
    assert Folder(tmp_path, "train").classes == ("0", "1")
    trees.save_mask(tmp_path / "masks" / "n00.png", trees.values_of(0, 1, 2, 3, 4))
    assert Folder(tmp_path, "train").classes == ("0", "1", "2", "3", "4")


def test_palette_masks_are_index_masks(tmp_path: Path) -> None:
    make(tmp_path, 0, classes="classes: [a, b]")
    for name in NAMES:
        mask = Image.fromarray(trees.values_of(0, 1).astype(np.uint8))
        mask.putpalette([9, 9, 9, 200, 0, 0])
        mask.save(tmp_path / "masks" / f"{name}.png")
    assert trees.values_in(Folder(tmp_path, "train")[0].label) == [0, 1]
    (tmp_path / "classes.yaml").write_text("classes: {a: [200, 0, 0], b: [9, 9, 9]}")  # or by their colors
    dataset = Folder(tmp_path, "train")
    assert dataset[0].label[0, :2].tolist() == [1, 0]
    assert dataset.palette == ((200, 0, 0), (9, 9, 9))


def test_rgb_masks_go_through_the_color_table(tmp_path: Path) -> None:
    make(tmp_path, 0, classes="classes: {sky: [0, 0, 255], road: [128, 64, 128]}\nignore: [[0, 0, 0]]")
    pixels = np.zeros((12, 16, 3), dtype=np.uint8)
    pixels[:4], pixels[4:8] = (0, 0, 255), (128, 64, 128)
    for name in NAMES:
        Image.fromarray(pixels).save(tmp_path / "masks" / f"{name}.png")
    dataset = Folder(tmp_path, "train")
    assert dataset[0].label[::4, 0].tolist() == [0, 1, IGNORE]
    pixels[0, 0] = (1, 2, 3)
    Image.fromarray(pixels).save(tmp_path / "masks" / f"{dataset.pairs[0].name}.png")
    with pytest.raises(BadFileError, match=r"colors \(1, 2, 3\) are outside the color table; .* under ignore"):
        dataset[0]


def test_mask_classes_can_be_given(tmp_path: Path) -> None:
    make(tmp_path, 3, 4)
    dataset = Folder(tmp_path, "train", mask_classes=MaskClasses({"x": 4}, ignore=(3,)))
    assert dataset.classes == ("x",)
    assert trees.values_in(dataset[0].label) == [0, IGNORE]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: [a", "cannot be read as YAML"),
        ("classes: &a [*a]", "aliases are not supported"),
        ("names: [a]", "expected only classes: and optionally ignore:"),
        ("classes: [a]\nother: 1", "expected only classes: and optionally ignore:"),
        ("classes: 3", "classes is 3; expected names, or names with values or colors"),
        ("classes: [a, no]", "the name False is not text; put it in quotes"),
        ('classes: [a, "\\ud800"]', "is not valid Unicode; correct it"),
        ("classes: [a]\nclasses: [b]", "the key 'classes' occurs twice"),
        ("classes: {a: -1}", "-1 is not a mask value; expected an integer or a color"),
        ("classes: {a: [1, 2]}", r"\[1, 2\] is not a mask value"),
        ("classes: {a: [1, 2, 256]}", r"\[1, 2, 256\] is not a mask value"),
        ("classes: {a: 1, b: [0, 0, 0]}", "some values are integers and some are colors"),
        ("classes: [a, a]", "a name or a value occurs twice; expected each once"),
        ("classes: {a: 1, b: 1}", "a name or a value occurs twice; expected each once"),
        ("classes: {a: 255}\nignore: [255]", "a name or a value occurs twice; expected each once"),
        ("classes: [a]\nignore: 0", r"ignore is 0; expected a list such as \[255\]"),
        ("classes: [a]\nignore: 255", r"ignore is 255; expected a list such as \[255\]"),
        (f"classes: [{', '.join(f'c{k}' for k in range(255))}]", "255 classes; expected at most 254"),
    ],
)
def test_an_invalid_classes_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "classes.yaml").write_text(text)
    with pytest.raises(BadFileError, match=rf"classes\.yaml: .*{message}"):
        read_mask_classes(tmp_path)


def test_missing_masks_and_directories_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"images: no such directory; expected images/ and masks/ in"):
        Folder(tmp_path, "train")
    make(tmp_path, 0, 1, names=["a", "b", "c"], classes="classes: [x, y]")
    (tmp_path / "masks" / "a.png").unlink()
    missing = Folder(tmp_path, "train").missing() + Folder(tmp_path, "val").missing()
    assert missing == [tmp_path / "masks" / "a.png"]
    trees.save_image(tmp_path / "images" / "b.png")
    with pytest.raises(BadFileError, match=r"b\.png: b\.jpg has the same name"):
        Folder(tmp_path, "train")


def test_masks_without_classes_and_with_too_many_are_reported(tmp_path: Path) -> None:
    make(tmp_path / "nothing", 255)
    with pytest.raises(BadFileError, match=r"nothing: no mask with a value other than 255"):
        Folder(tmp_path / "nothing", "train")
    make(tmp_path / "much", 0, names=["a", "b"])
    Image.fromarray(np.arange(300, dtype=np.uint16).reshape(15, 20)).save(tmp_path / "much" / "masks" / "a.png")
    with pytest.raises(BadFileError, match=r"much: masks with 299 different values up to 299; expected at most 254"):
        Folder(tmp_path / "much", "train")


def test_hidden_files_are_skipped(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["a", "b"], classes="classes: [x, y]")
    trees.save_image(tmp_path / "images" / ".ipynb_checkpoints" / "a-checkpoint.png")
    trees.save_image(tmp_path / "images" / "._a.png")
    assert sorted(names_of(Folder(tmp_path, "train")) + names_of(Folder(tmp_path, "val"))) == ["a", "b"]


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("images/{split}/{name}.jpg", "labels/{split}/{name}.png"),
        ("{split}/images/{name}.jpg", "{split}/masks/{name}.png"),
        ("{split}/images/{name}.jpg", "{split}/labels/{name}_mask.png"),
        ("images/{split}/{name}.jpg", "annotations/{split}/{name}_gt.png"),
    ],
)
def test_common_directory_trees_and_names_of_masks_are_found(tmp_path: Path, images: str, masks: str) -> None:
    for split, name in (("train", "a"), ("train", "b_gt"), ("valid", "a")):
        trees.save_image(tmp_path / images.format(split=split, name=name))
        trees.save_mask(tmp_path / masks.format(split=split, name=name), trees.values_of(0, 1))
    assert splits_in(tmp_path) == ("train", "val")
    assert names_of(Folder(tmp_path, "train")) == ["train/a", "train/b_gt"]
    assert names_of(Folder(tmp_path, "val")) == ["val/a"]
    for split in ("train", "val"):
        dataset = open_dataset("folder", tmp_path, split)
        assert trees.values_in(dataset[0].label) == [0, 1]
    mask = tmp_path / masks.format(split="train", name="a")
    mask.unlink()
    missing = Folder(tmp_path, "train").missing()
    assert [path.parent for path in missing] == [mask.parent]


def test_two_masks_of_one_image_are_an_error(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, names=["a", "b"], classes="classes: [x, y]")
    trees.save_mask(tmp_path / "masks" / "a_mask.png", trees.values_of(0))
    with pytest.raises(BadFileError, match=r"a_mask\.png: a\.png is a mask of the same image; expected one mask per"):
        Folder(tmp_path, "train")


def test_rgb_masks_with_equal_channels_hold_class_ids(tmp_path: Path) -> None:
    make(tmp_path, 0, 1, 2, 255)
    gray = Folder(tmp_path, "train")
    labels = [sample.label for sample in (gray[k] for k in range(len(gray)))]
    for path in (tmp_path / "masks").iterdir():
        Image.open(path).convert("RGB").save(path)
    colored = Folder(tmp_path, "train")
    assert colored.classes == ("0", "1", "2")
    assert all(colored[k].label.equal(label) for k, label in enumerate(labels))


def test_every_color_becomes_a_class_without_a_classes_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 0, names=["a", "b"])
    colors = np.array([(0, 0, 0), (192, 0, 0), (0, 128, 0)], dtype=np.uint8)
    for path in (tmp_path / "masks").iterdir():
        Image.fromarray(colors[trees.values_of(0, 1, 2)]).save(path)
    dataset = Folder(tmp_path, "train")
    assert dataset.classes == ("#000000", "#008000", "#c00000")
    assert dataset.palette == ((0, 0, 0), (0, 128, 0), (192, 0, 0))
    assert trees.values_in(dataset[0].label) == [0, 1, 2]
    assert "found 3 colors in the masks, one class each: #000000, #008000, #c00000" in caplog.text
    noise = np.random.default_rng(0).integers(0, 256, (12, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "masks" / "a.png")
    with pytest.raises(BadFileError, match=r"masks with 4\d\d different colors; expected one color per class"):
        Folder(tmp_path, "train")


def test_classes_are_read_by_value_too(tmp_path: Path) -> None:
    make(tmp_path, 0, 7, classes="classes: {0: background, 7: cat}")
    dataset = Folder(tmp_path, "train")
    assert dataset.classes == ("background", "cat")
    assert trees.values_in(dataset[0].label) == [0, 1]


def test_data_init_lists_the_values_and_writes_classes_to_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, 0, 0, 0, 4, 255)
    assert main(["data", "init", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "60." in printed
    assert "values in 20 masks" in printed
    text = (tmp_path / "classes.yaml").read_text()
    assert "  class_1: 4  # 19.79% of the pixels, in 20 of 20 masks" in text
    dataset = Folder(tmp_path, "train")
    assert dataset.classes == ("class_0", "class_1")
    assert trees.values_in(dataset[0].label) == [0, 1, IGNORE]
    assert main(["data", "init", str(tmp_path)]) == 2
    assert "already exists; edit it" in capsys.readouterr().err


def test_data_init_of_black_and_white_and_of_color_masks(tmp_path: Path) -> None:
    make(tmp_path / "binary", 0, 255)
    assert main(["data", "init", str(tmp_path / "binary")]) == 0
    assert read_mask_classes(tmp_path / "binary").classes == {"background": 0, "foreground": 255}
    make(tmp_path / "colors", 0, names=["a", "b"])
    for name in ("a", "b"):
        colors = np.array([(0, 0, 0), (192, 0, 0)], dtype=np.uint8)
        Image.fromarray(colors[trees.values_of(0, 1)]).save(tmp_path / "colors/masks" / f"{name}.png")
    assert main(["data", "init", str(tmp_path / "colors")]) == 0
    assert read_mask_classes(tmp_path / "colors").classes == {"class_0": (0, 0, 0), "class_1": (192, 0, 0)}


def test_a_label_export_in_place_of_masks_gets_the_advice_to_import_it(tmp_path: Path) -> None:
    trees.save_image(tmp_path / "images" / "a.jpg")
    trees.write_lines(tmp_path / "labels" / "a.txt", ["0 0.1 0.1 0.2 0.2 0.3 0.1"])
    with pytest.raises(BadFileError, match=r"labels: no masks found.*convert a label export with caaseg data import"):
        Folder(tmp_path, "train")
