"""The dataclasses that say what a run is."""

import re
from dataclasses import FrozenInstanceError
from typing import Any, get_args

import pytest

from caaseg import attention, config
from caaseg.config import Architecture, DataRecipe, LossRecipe, ModelRecipe, OptimizerRecipe, Recipe
from caaseg.models import HEADS


def test_names_are_those_of_the_parts_they_name() -> None:
    assert tuple(HEADS) == config.HEAD_NAMES
    assert get_args(config.Activation) == get_args(attention.Activation)
    assert get_args(config.Implementation) == get_args(attention.Implementation)


def test_a_recipe_needs_no_more_than_a_dataset_and_cannot_be_changed() -> None:
    recipe = Recipe(model=ModelRecipe(), data=DataRecipe(dataset="scenes"))
    assert (recipe.steps, recipe.batch_size, recipe.optimizer.lr, recipe.loss.aux_weight) == (40_000, 16, 0.01, 0.4)
    with pytest.raises(FrozenInstanceError):
        recipe.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        (Architecture, {"head": "caaa"}, "head is 'caaa' (did you mean caa?); expected one of fcn, axial"),
        (Architecture, {"output_stride": 32}, "output_stride is 32; expected 8 or 16"),
        (Architecture, {"resnet_variant": "x"}, "resnet_variant is 'x'; expected standard or authors"),
        (Architecture, {"channels": 0}, "channels is 0; expected a whole number from 1 to 65536"),
        (Architecture, {"stages": 0}, "stages is 0; expected a whole number from 1, or none for all"),
        (
            Architecture,
            {"stages": 3, "resnet_variant": "authors"},
            "stages is 3, but resnet_variant authors is the paper's network, whole; leave out one",
        ),
        (Architecture, {"input_upsampling": 0.5}, "input_upsampling is 0.5; expected a factor from 1 to 4"),
        (Architecture, {"input_upsampling": float("nan")}, "input_upsampling is nan; expected a factor from 1 to 4"),
        (DataRecipe, {"dataset": "x", "workers": -1}, "workers is -1; expected 0 or more"),
        (LossRecipe, {"aux_weight": -1}, "aux_weight is -1; expected 0 or more"),
        (LossRecipe, {"ohem": 0}, "ohem is 0; expected a share above 0, at most 1"),
        (OptimizerRecipe, {"lr": float("nan")}, "lr is nan; expected 0 or more"),
        (OptimizerRecipe, {"momentum": 1}, "momentum is 1; expected 0 or more and below 1"),
        (OptimizerRecipe, {"ema": -0.1}, "ema is -0.1; expected 0 or more and below 1"),
        (OptimizerRecipe, {"clip_grad_norm": 0}, "clip_grad_norm is 0; expected a norm above 0, or none"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(part: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        part(**options)


def test_accumulation_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="batch_size is 16, which 3 accumulation steps do not divide evenly"):
        Recipe(model=ModelRecipe(), data=DataRecipe(dataset="scenes"), accumulate=3)
