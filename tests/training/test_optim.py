"""Learning rates against calculations by hand, and parameters with weight decay."""

import math

import pytest

from caaseg.config import OptimizerRecipe
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
