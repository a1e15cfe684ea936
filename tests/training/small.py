"""A recipe so small that a step takes some milliseconds."""

from caaseg.config import Recipe
from caaseg.recipes import load_recipe

WORDS = (
    *("--model.backbone", "test_resnet", "--model.channels", "16", "--model.key_channels", "4"),
    *("--model.gate_width", "8", "--model.output_stride", "16"),
    *("--data.scenes.size", "64", "64", "--data.scenes.length", "6", "--data.workers", "0"),
    *("--batch_size", "2", "--steps", "6", "--validate_every", "3", "--checkpoint_every", "3"),
    *("--optimizer.warmup_steps", "2"),
)


def small_recipe(*overrides: str) -> Recipe:
    return load_recipe("scenes/caa_resnet18", [*WORDS, *overrides])
