"""Resized training images, and the sizes of images in a dataset."""

from pathlib import Path

import torch
from torch import Tensor

from caaseg.config import Recipe
from caaseg.data.catalogue import open_dataset
from caaseg.data.palette import distinct_colors
from caaseg.data.resized import ResizedDataset, short_sides
from caaseg.data.sample import Sample
from caaseg.models.image_size import resize_images
from caaseg.training.setup import training_size
from tests.data import trees


def write_folder(root: Path) -> Path:
    for k, (height, width) in enumerate([(40, 60), (80, 64), (30, 30), (90, 100)]):
        trees.save_image(root / "images" / f"{k}.jpg", seed=k, height=height, width=width)
        trees.save_mask(root / "masks" / f"{k}.png", trees.values_of(0, 1, height=height, width=width))
    trees.write_lines(root / "train.txt", ["0", "1", "2", "3"])
    (root / "classes.yaml").write_text("classes: [a, b]")
    return root


class OneImage:
    """A black image with a label."""

    classes: tuple[str, ...] = tuple(map(str, range(35)))
    palette = distinct_colors(35)

    def __init__(self, label: Tensor) -> None:
        self.label = label

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return Sample(torch.zeros(3, *self.label.shape, dtype=torch.uint8), self.label, str(index))


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


def test_training_images_are_resized_like_images_to_predict(tmp_path: Path) -> None:
    dataset = open_dataset("folder", write_folder(tmp_path), "train")
    resized = ResizedDataset(dataset, 40)
    for k in (1, 3):
        image = resized[k].image
        assert torch.equal(image, resize_images(dataset[k].image[None], (image.shape[1], image.shape[2]))[0])


def test_labels_are_resized_to_the_pixel_at_the_same_center() -> None:
    label = torch.arange(5 * 7, dtype=torch.uint8).view(5, 7)
    assert ResizedDataset(OneImage(label), 3)[0].label.tolist() == [[0, 2, 4, 6], [14, 16, 18, 20], [28, 30, 32, 34]]


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
