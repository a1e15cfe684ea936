"""A model's way from its recipe to an exported file, which tests of heads and of backbones share."""

from pathlib import Path

import torch

import caaseg
from caaseg.evaluation.evaluate import evaluate
from caaseg.models.export import TOLERANCE, export_model, scene_images
from caaseg.models.onnx import OnnxModel
from caaseg.training.run import train
from caaseg.training.setup import open_split
from tests.training.small import small_recipe


def check_round_trip(directory: Path, *options: str) -> None:
    """Train a small model for two steps, evaluate, save, load and export it, and compare the results.

    Args:
        directory: an empty directory.
        *options: changes of the recipe, such as --model.head psp --model.backbone test_resnet.
    """
    recipe = small_recipe("--steps", "2", *options)
    result = train(recipe, directory / "run", device="cpu")
    assert result.finished
    assert result.evaluation is not None

    model = caaseg.load_model(directory / "run")
    assert isinstance(model, caaseg.Segmenter)
    assert model.config.head == recipe.model.head
    scenes = open_split(recipe, recipe.data.val_split)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Equal, because the layout is the same as in training: another layout has other rounding errors.
    assert torch.equal(evaluate(model, scenes).confusion, result.evaluation.confusion)

    export_model(model, directory / "model.onnx")  # compares logits at random sizes
    exported = OnnxModel(directory / "model.onnx")
    images = scene_images(2, 71, 103, torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(levels).view(3, 1, 1) * 255 for levels in (model.backbone.mean, model.backbone.std))
    with torch.inference_mode():
        expected = model((images - mean) / std).logits
    torch.testing.assert_close(exported(images), expected, rtol=TOLERANCE, atol=TOLERANCE)
    found = evaluate(exported, scenes).confusion
    assert (found - result.evaluation.confusion).abs().sum() <= 1e-3 * found.sum()
