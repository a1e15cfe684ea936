"""Resized training images, and the sizes of images in a dataset."""

from pathlib import Path

import torch

from caaseg.config import Recipe
from caaseg.data.catalogue import open_dataset
from caaseg.data.resized import ResizedDataset, short_sides
from caaseg.training.setup import training_size
from tests.data import trees


def write_folder(root: Path) -> Path:
    for k, (height, width) in enumerate([(40, 60), (80, 64), (30, 30), (90, 100)]):
        trees.save_image(root / "images" / f"{k}.jpg", seed=k, height=height, width=width)
        trees.save_mask(root / "masks" / f"{k}.png", trees.values_of(0, 1, height=height, width=width))
    trees.write_lines(root / "train.txt", ["0", "1", "2", "3"])
    (root / "classes.yaml").write_text("classes: [a, b]")
    return root


def test_large_images_and_labels_are_resized_to_the_short_side(tmp_path: Path) -> None:
    dataset = open_dataset("folder", write_folder(tmp_path), "train")
    resized = ResizedDataset(dataset, 40)
    assert [tuple(resized[k].label.shape) for k in range(4)] == [(40, 60), (50, 40), (30, 30), (40, 44)]
    for k in range(4):
        image, label, name = resized[k]
        assert image.shape[1:] == label.shape
        assert image.dtype == torch.uint8
        assert set(label.flatten().tolist()) <= {0, 1}
        assert name == dataset[k].name
    assert resized[2].image.equal(dataset[2].image)


def test_short_sides_are_those_of_all_images_also_of_joined_splits(tmp_path: Path) -> None:
    write_folder(tmp_path)
    trees.write_lines(tmp_path / "train.txt", ["0", "1"])
    trees.write_lines(tmp_path / "val.txt", ["2", "3"])
    assert short_sides(open_dataset("folder", tmp_path, "train")) == [40, 64]
    assert short_sides(open_dataset("folder", tmp_path, "train+val")) == [30, 40, 64, 90]


def test_auto_resizes_to_twice_the_crop_if_images_are_much_larger(tmp_path: Path) -> None:
    data = open_dataset("folder", write_folder(tmp_path), "train")

    def size(crop: int, resize: object) -> tuple[int | None, tuple[int, int, int]]:
        values = {"dataset": "folder", "root": str(tmp_path), "crop": [crop, crop], "resize": resize}
        return training_size(Recipe.read({"data": values}), data)

    assert size(16, "auto") == (32, (30, 32, 32))
    assert size(32, "auto") == (None, (30, 64, 90))
    assert size(16, None) == (None, (30, 64, 90))
    assert size(16, 50) == (50, (30, 50, 50))
