"""The catalogue agrees with its datasets; opening a split reports missing files."""

from pathlib import Path

import pytest

from caaseg.cli import main
from caaseg.data.catalogue import DATASETS, ConcatSplits, open_dataset, splits, with_palette
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import BadFileError, Sample, SegmentationDataset
from tests.data import trees


def test_entries_agree_with_their_datasets(tmp_path: Path) -> None:
    trees.camvid(tmp_path / "camvid")
    trees.cityscapes(tmp_path / "cityscapes")
    trees.coco_stuff_164k(tmp_path / "coco_stuff_164k")
    trees.ade20k(tmp_path / "ade20k")
    trees.voc2012(tmp_path / "voc2012")
    for name in ("camvid", "cityscapes", "coco_stuff_164k", "ade20k", "voc2012"):
        for split in splits(name, tmp_path / name):
            dataset = open_dataset(name, tmp_path / name, split)
            assert dataset.classes == DATASETS[name].classes
            assert dataset.palette == DATASETS[name].palette


@pytest.mark.parametrize(
    ("name", "classes", "counts"),
    [
        ("pascal_context", 59, {"train": 4998, "val": 5105}),
        ("pascal_context_60", 60, {"train": 4998, "val": 5105}),
        ("coco_stuff_10k", 171, {"train": 9000, "test": 1000}),
        ("coco_stuff_164k", 171, {"train": 118287, "val": 5000}),
        ("ade20k", 150, {"train": 20210, "val": 2000}),
        ("voc2012", 21, {"train": 1464, "val": 1449, "trainval": 2913, "train_aug": 10582}),
        ("cityscapes", 19, {"train": 2975, "val": 500, "test": 1525}),
        ("camvid", 11, {"train": 367, "val": 101, "test": 233}),
    ],
)
def test_entries_have_the_official_classes_and_counts(name: str, classes: int, counts: dict[str, int]) -> None:
    entry = DATASETS[name]
    assert len(entry.classes) == len(set(entry.palette)) == classes
    assert entry.counts == counts


def test_the_splits_of_a_folder_depend_on_its_content(tmp_path: Path) -> None:
    for name in "abcd":
        trees.save_image(tmp_path / "images" / f"{name}.png")
        trees.save_mask(tmp_path / "masks" / f"{name}.png", trees.values_of(0, 1))
    (tmp_path / "classes.yaml").write_text("classes: [x, y]")
    assert splits("folder", tmp_path) == ("train", "val")
    assert len(open_dataset("folder", tmp_path, "val", val_fraction=0.5, seed=3)) == 2


def test_missing_files_are_reported_when_a_dataset_is_opened(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    (tmp_path / "train" / "0001TP_train1.png").unlink()
    with pytest.raises(BadFileError, match=r"_train1\.png: no such file; run caaseg data check camvid --root .* to"):
        open_dataset("camvid", tmp_path, "train")
    (tmp_path / "trainannot" / "0001TP_train2.png").unlink()
    with pytest.raises(BadFileError, match=r"train1\.png: no such file, and 1 more files of split train are missing"):
        open_dataset("camvid", tmp_path, "train")
    (tmp_path / "val.txt").write_text("\n")
    with pytest.raises(BadFileError, match="no images in split val of camvid; expected at least one"):
        open_dataset("camvid", tmp_path, "val")


def test_the_error_for_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(ValueError, match="no dataset is called 'ade'; expected any of pascal_context, "):
        open_dataset("ade", Path(), "train")


def test_the_list_shows_classes_sizes_splits_and_how_to_get_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in DATASETS:
        assert name in shown
    for text in ("171 classes", "118287", "480 x 360", "2048 x 1024", "www.cityscapes-dataset.com", "not verified"):
        assert text in shown
    assert "train_aug 10582" in shown
    assert "…" not in shown  # nothing is cut off on 80 columns


def test_several_splits_are_opened_as_one_dataset(tmp_path: Path) -> None:
    trees.camvid(tmp_path)
    parts = [open_dataset("camvid", tmp_path, split) for split in ("train", "val")]
    joined = open_dataset("camvid", tmp_path, "train+val")
    assert len(joined) == 5
    assert [joined[k].name for k in range(5)] == [part[k].name for part in parts for k in range(len(part))]
    assert (joined.classes, joined.palette) == (parts[0].classes, parts[0].palette)
    with pytest.raises(
        ValueError, match="splits of 11 and 8 classes cannot be concatenated; expected the same classes"
    ):
        ConcatSplits([parts[0], Scenes()])


class WithoutPalette:
    """A user-defined dataset without colors."""

    classes: tuple[str, ...] = Scenes.classes

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Sample:
        return Scenes(length=2, size=(64, 64))[index]


def test_a_missing_palette_is_replaced_by_distinct_colors() -> None:
    dataset: SegmentationDataset = with_palette(WithoutPalette())  # type: ignore[arg-type]
    assert dataset.palette == distinct_colors(8)
    assert dataset.classes == Scenes.classes
    assert [dataset[k].name for k in range(len(dataset))] == ["train-0-000000", "train-0-000001"]
    scenes = Scenes()
    assert with_palette(scenes) is scenes
