"""Train so that the gradient of a step does not depend on how its batch is split: no dropout, fixed batch statistics.

The images have very different shares of ignored pixels, because parts of a batch are weighted by their labeled pixels.

    python -m tests.training.frozen OUT DEVICES OPTIONS...
"""

import sys
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import caaseg
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE, Color, Sample
from caaseg.training.setup import build_model
from tests.training.small import small_recipe


class PartlyIgnored:
    """Scenes whose share of ignored pixels decreases with the index; the first scene is ignored completely."""

    classes: tuple[str, ...] = Scenes.classes
    palette: tuple[Color, ...] = Scenes.palette

    def __init__(self, split: Literal["train", "val"]) -> None:
        self.scenes = Scenes(split, length=6, size=(64, 64))

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Sample:
        image, label, name = self.scenes[index]
        label[index * len(label) // len(self) :] = IGNORE
        return Sample(image, label, name)


def train_frozen(out: Path, *options: str, devices: int = 1) -> list[int]:
    """Train a small model with SGD. Return the seed of torch in each training step of this process."""
    settings = ("--batch_size", "8", "--steps", "4", "--validate_every", "2", "--checkpoint_every", "4")
    sgd = ("--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--model.aux", "true")
    recipe = small_recipe(*settings, *sgd, *options)
    train_data, val_data = PartlyIgnored("train"), PartlyIgnored("val")
    model = build_model(recipe, train_data)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm | nn.Dropout):
            part.eval()
            part.train = lambda mode=True, part=part: part  # type: ignore[method-assign]
    seeds: list[int] = []
    model.backbone.register_forward_hook(lambda part, *_: seeds.append(torch.initial_seed()) if part.training else None)
    caaseg.train(recipe, out, data=(train_data, val_data), model=model, device="cpu", devices=devices)
    return seeds


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_frozen(Path(sys.argv[1]), *sys.argv[3:], devices=int(sys.argv[2]))
