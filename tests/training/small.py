"""A recipe whose steps take milliseconds, and a small directory of images and masks."""

from pathlib import Path

import numpy as np
from PIL import Image

from caaseg.config import Recipe
from caaseg.recipes import load_recipe

SMALL_ARGUMENTS = (
    *("--model.backbone", "test_resnet", "--model.channels", "16", "--model.key_channels", "4"),
    *("--model.gate_width", "8", "--model.output_stride", "16"),
    *("--data.scenes.size", "64", "64", "--data.scenes.length", "6", "--data.workers", "0"),
    *("--batch_size", "2", "--steps", "6", "--validate_every", "3", "--checkpoint_every", "3"),
    *("--optimizer.warmup_steps", "2"),
)


def small_recipe(*overrides: str) -> Recipe:
    """Return the recipe for scenes with a small model and few steps, changed by further options."""
    return load_recipe("scenes/caa_resnet18", [*SMALL_ARGUMENTS, *overrides])


def images_and_masks(root: Path, number: int = 6) -> None:
    """Write images of a red rectangle on blue, and their masks, to images/ and masks/."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for k in range(number):
        mask = np.zeros((48 + k, 64), np.uint8)
        mask[10:30, 5 * k : 5 * k + 25] = 1
        image = np.where(mask[..., None] == 1, (200, 40, 40), (40, 40, 200)) + rng.integers(-20, 20, (*mask.shape, 3))
        Image.fromarray(image.astype(np.uint8)).save(root / "images" / f"{k}.jpg")
        Image.fromarray(mask).save(root / "masks" / f"{k}.png")
