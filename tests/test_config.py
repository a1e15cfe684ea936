"""Settings of models and runs: bounds, messages and copies."""

import re
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from caaseg import attention, config
from caaseg.config import (
    Architecture,
    Augmentation,
    DataRecipe,
    FolderOptions,
    LossRecipe,
    ModelConfig,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScenesOptions,
)
from caaseg.data.datasets.scenes import Difficulty
from caaseg.errors import CaasegError
from caaseg.models import HEADS
from caaseg.settings import flat_fields


def test_allowed_values_equal_those_of_the_implementation() -> None:
    assert tuple(HEADS) == config.HEAD_NAMES
    assert get_args(config.Activation) == get_args(attention.Activation)
    assert get_args(config.Implementation) == get_args(attention.Implementation)
    assert get_args(config.Difficulty) == get_args(Difficulty)


def test_a_recipe_needs_only_a_dataset_and_is_immutable() -> None:
    recipe = Recipe(data=DataRecipe(dataset="scenes"))
    assert (recipe.steps, recipe.batch_size, recipe.optimizer.lr, recipe.loss.aux_weight) == (40_000, 16, 0.01, 0.4)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.steps = 3
    assert hash(recipe) == hash(recipe.replace(steps=40_000))


def test_every_field_has_a_description() -> None:
    for settings in (Recipe, ModelConfig):
        assert all(field.description for field in flat_fields(settings).values())


def test_a_changed_copy_is_validated() -> None:
    recipe = Recipe(data=DataRecipe(dataset="scenes"))
    assert recipe.replace(steps=3).steps == 3
    with pytest.raises(CaasegError, match="steps is 0; expected greater than or equal to 1"):
        recipe.replace(steps=0)
    with pytest.raises(CaasegError, match=r"unknown key step; did you mean steps\?"):
        recipe.replace(step=3)


def test_as_dict_returns_lists_that_are_read_back_to_the_same_settings() -> None:
    recipe = Recipe(model=ModelRecipe(multi_grid=(1, 2, 4)), data=DataRecipe(dataset="scenes", crop=(32, 64)))
    plain = recipe.as_dict()
    assert (plain["model"]["multi_grid"], plain["data"]["crop"]) == ([1, 2, 4], [32, 64])
    assert Recipe.read(plain) == recipe


def test_the_options_of_a_dataset_are_typed() -> None:
    scenes, folder = ScenesOptions(size=(64, 96), length=3), FolderOptions(val_fraction=0.2)
    data = DataRecipe(dataset="scenes", scenes=scenes, folder=folder)
    assert data.options == {"length": 3, "size": (64, 96), "difficulty": "medium", "seed": 0}
    assert data.replace(dataset="folder").options == {"val_fraction": 0.2, "seed": 0}
    assert data.replace(dataset="camvid").options == {}


@pytest.mark.parametrize("size", [(352, 480), [352, 480], "352x480", "352X480"])
def test_a_size_is_two_integers_or_one_text(size: Any) -> None:
    assert Augmentation(crop=size).crop == (352, 480)


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        (Architecture, {"head": "caaa"}, "head is 'caaa'; expected fcn, axial, axial_se, caa, "),
        (Architecture, {"head": "caaa"}, "or file.py:Class; did you mean caa?"),
        (Architecture, {"output_stride": 4}, "output_stride is 4; expected 8, 16 or 32"),
        (Architecture, {"resnet_variant": "x"}, "resnet_variant is 'x'; expected 'standard' or 'authors'"),
        (Architecture, {"channels": 0}, "channels is 0; expected greater than or equal to 1"),
        (Architecture, {"channels": True}, "channels is True; expected a valid integer"),
        (Architecture, {"stages": 0}, "stages is 0; expected greater than or equal to 1"),
        (
            Architecture,
            {"stages": 3, "resnet_variant": "authors"},
            "stages is 3, but resnet_variant authors uses all stages; omit one of them",
        ),
        (
            Architecture,
            {"stages": 3, "top_features": True},
            "stages is 3, but top_features needs all stages; omit one of them",
        ),
        (Architecture, {"input_upsampling": 0.5}, "input_upsampling is 0.5; expected greater than or equal to 1"),
        (Architecture, {"input_upsampling": float("nan")}, "input_upsampling is nan; expected a finite number"),
        (Augmentation, {"flip": 7}, "flip is 7; expected less than or equal to 1"),
        (Augmentation, {"crop": (0, 0)}, "crop is (0, 0); expected greater than or equal to 1"),
        (Augmentation, {"crop": "64xy"}, "crop is '64xy'; expected a valid integer"),
        (Augmentation, {"crop": 64}, "crop is 64; expected a list of values"),
        (
            Augmentation,
            {"scales": (2, 0.5)},
            "scales is (2, 0.5); expected the smallest, then the largest, from",
        ),
        (DataRecipe, {"dataset": "x", "workers": -1}, "workers is -1; expected greater than or equal to 0"),
        (FolderOptions, {"val_fraction": 1}, "val_fraction is 1; expected less than 1"),
        (LossRecipe, {"aux_weight": -1}, "aux_weight is -1; expected greater than or equal to 0"),
        (LossRecipe, {"class_weights": "lgo"}, "class_weights is 'lgo'; expected 'none' or 'log'; did you mean log?"),
        (LossRecipe, {"ohem": 0}, "ohem is 0; expected greater than 0"),
        (OptimizerRecipe, {"lr": float("nan")}, "lr is nan; expected a finite number"),
        (OptimizerRecipe, {"momentum": 1}, "momentum is 1; expected less than 1"),
        (OptimizerRecipe, {"ema": -0.1}, "ema is -0.1; expected greater than or equal to 0"),
        (OptimizerRecipe, {"clip_grad_norm": 0}, "clip_grad_norm is 0; expected greater than 0"),
        (
            OptimizerRecipe,
            {"lr": -1, "power": -1, "ema": 2},
            "lr is -1; expected greater than or equal to 0",
        ),
        (ModelConfig, {}, "num_classes is missing: Number of classes."),
        (ModelConfig, {"num_classes": 2, "classes": ["a"]}, "classes has 1 entries, but num_classes is 2"),
        (Recipe, {"data": {"dataset": "x"}, "accumulate": 3}, "batch_size is 16; expected a multiple of accumulate, 3"),
        (Recipe, {"data": {"dataset": "x", "flip": 7}}, "data.flip is 7; expected less than or equal to 1"),
        (
            Recipe,
            {"data": {"dataset": "x"}, "cuda_graph": True, "compile": True},
            "cuda_graph is true, but works neither with compile nor with accumulate above 1",
        ),
    ],
)
def test_invalid_values_are_refused_with_the_key_and_the_expected_values(
    part: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaasegError, match=re.escape(message)):
        part.read(options)
