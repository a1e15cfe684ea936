"""Learning rates against calculations by hand, and parameters with weight decay."""

import math
from itertools import pairwise
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from caaseg.config import OptimizerRecipe
from caaseg.errors import CaasegError
from caaseg.models.backbones import FeatureInput
from caaseg.training.optim import learning_rate, make_optimizer
from tests.small_models import small_model


def test_poly_falls_from_the_learning_rate_towards_zero() -> None:
    recipe = OptimizerRecipe(lr=0.01, power=0.9)
    assert learning_rate(0, 100, recipe) == 0.01
    assert learning_rate(50, 100, recipe) == pytest.approx(0.01 * 0.5**0.9)
    assert learning_rate(99, 100, recipe) == pytest.approx(0.01 * 0.01**0.9)


def test_cosine_has_half_the_learning_rate_in_the_middle() -> None:
    recipe = OptimizerRecipe(lr=0.01, schedule="cosine")
    assert learning_rate(0, 100, recipe) == pytest.approx(0.01)
    assert learning_rate(50, 100, recipe) == pytest.approx(0.005)
    assert learning_rate(25, 100, recipe) == pytest.approx(0.01 * (1 + math.cos(math.pi / 4)) / 2)


def test_exponential_multiplies_by_the_same_factor_in_each_step() -> None:
    recipe = OptimizerRecipe(lr=0.01, schedule="exponential", final_lr_factor=0.5)
    rates = [learning_rate(step, 100, recipe) for step in range(101)]
    assert rates[::100] == pytest.approx([0.01, 0.005])
    assert [after / before for before, after in pairwise(rates)] == pytest.approx([0.5**0.01] * 100)


def test_adam_and_rmsprop_are_those_of_torch() -> None:
    model = small_model()
    for name, kind in (("adam", Adam), ("adamw", AdamW), ("rmsprop", RMSprop), ("sgd", SGD)):
        assert type(make_optimizer(model, OptimizerRecipe.read({"name": name}))) is kind


def test_the_warm_up_rises_to_the_schedule() -> None:
    plain, warm = OptimizerRecipe(lr=0.1), OptimizerRecipe(lr=0.1, warmup_steps=4)
    for step, factor in enumerate((0.2, 0.4, 0.6, 0.8, 1.0, 1.0)):
        assert learning_rate(step, 10, warm) == pytest.approx(factor * learning_rate(step, 10, plain))


@pytest.mark.parametrize("warmup", [10, 11, 1000])
def test_a_warm_up_as_long_as_the_run_is_shortened_to_a_tenth_of_the_run(warmup: int) -> None:
    plain, warm = OptimizerRecipe(lr=0.1), OptimizerRecipe(lr=0.1, warmup_steps=warmup)
    factors = [learning_rate(step, 10, warm) / learning_rate(step, 10, plain) for step in range(10)]
    assert factors == pytest.approx([0.5, *[1.0] * 9])


@pytest.mark.parametrize("decay_backbone", [True, False])
def test_weight_decay_skips_biases_and_optionally_the_backbone(decay_backbone: bool) -> None:
    model = small_model()
    optimizer = make_optimizer(model, OptimizerRecipe(weight_decay=0.5, decay_backbone=decay_backbone))
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim > 1 and (decay_backbone or not name.startswith("backbone."))
        assert decay[parameter] == (0.5 if decayed else 0.0), name


def settings_of(model: nn.Module, key: str, **options: Any) -> dict[str, Any]:
    """Return a setting of the optimizer's group per parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, OptimizerRecipe.read(options)).param_groups
    return {names[parameter]: group[key] for group in groups for parameter in group["params"]}


def test_position_embeddings_and_tokens_have_no_weight_decay() -> None:
    decay = settings_of(small_model(backbone="test_vit"), "weight_decay", weight_decay=0.5)
    prefix = "backbone.net.model."
    assert decay[f"{prefix}pos_embed"] == decay[f"{prefix}cls_token"] == decay[f"{prefix}norm.weight"] == 0
    assert decay[f"{prefix}blocks.0.attn.qkv.weight"] == decay[f"{prefix}patch_embed.proj.weight"] == 0.5


@pytest.mark.parametrize(
    ("backbone", "layers", "expected"),
    [
        (
            "resnet18",
            9,
            {"conv1.weight": 9, "layer1.0.conv1.weight": 8, "layer1.1.bn2.bias": 7, "layer4.1.bn2.weight": 1},
        ),
        (
            "test_vit",
            7,
            {
                "model.pos_embed": 7,
                "model.blocks.0.attn.qkv.weight": 6,
                "model.blocks.5.mlp.fc1.bias": 1,
                "model.norm.bias": 1,
            },
        ),
    ],
)
def test_layer_decay_multiplies_the_learning_rate_per_layer(
    backbone: str, layers: int, expected: dict[str, int]
) -> None:
    model = small_model("fcn", backbone=backbone)
    factors = settings_of(model, "factor", layer_decay=0.5, head_lr_factor=3)
    for name, power in expected.items():
        assert factors[f"backbone.net.{name}"] == 0.5**power, name
    assert factors["classifier.weight"] == 3
    assert len({factor for name, factor in factors.items() if name.startswith("backbone.")}) == layers
    assert set(settings_of(model, "factor", head_lr_factor=3).values()) == {1, 3}


def test_layer_decay_needs_a_timm_backbone() -> None:
    model = small_model("fcn", backbone=FeatureInput(4))
    with pytest.raises(CaasegError, match=r"optimizer.layer_decay is 0.5, but needs a timm backbone; use 1"):
        make_optimizer(model, OptimizerRecipe(layer_decay=0.5))
