"""Runs the command with dropout off, batch statistics fixed, and labels of which very different shares are ignored.

So a step is the same sum whatever process computes which part of it. Usage: python -m tests.training.frozen WORDS
"""

import sys

import torch
from torch import nn

from caaseg.cli import main
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE, Sample


def always_evaluate(module: nn.Module, mode: bool = True) -> nn.Module:
    module.training = False
    return module


def partly_ignored(scenes: Scenes, index: int, draw: object = Scenes.__getitem__) -> Sample:
    image, label, name = draw(scenes, index)  # type: ignore[operator]
    label[index * len(label) // len(scenes) :] = IGNORE  # of the first scene all, of the last little
    return Sample(image, label, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    nn.BatchNorm2d.train = nn.Dropout.train = always_evaluate  # type: ignore[method-assign,assignment]
    Scenes.__getitem__ = partly_ignored  # type: ignore[method-assign]
    sys.exit(main())
