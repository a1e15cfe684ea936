"""Learning rates by hand."""

import math

import pytest

from caaseg.config import OptimizerRecipe
from caaseg.training.optim import learning_rate


def test_poly_falls_from_the_learning_rate_towards_zero() -> None:
    recipe = OptimizerRecipe(lr=0.01, power=0.9)
    assert learning_rate(0, 100, recipe) == 0.01
    assert learning_rate(50, 100, recipe) == pytest.approx(0.01 * 0.5**0.9)
    assert learning_rate(99, 100, recipe) == pytest.approx(0.01 * 0.01**0.9)


def test_cosine_is_half_way_in_the_middle() -> None:
    recipe = OptimizerRecipe(lr=0.01, schedule="cosine")
    assert learning_rate(0, 100, recipe) == pytest.approx(0.01)
    assert learning_rate(50, 100, recipe) == pytest.approx(0.005)
    assert learning_rate(25, 100, recipe) == pytest.approx(0.01 * (1 + math.cos(math.pi / 4)) / 2)


def test_the_warm_up_rises_to_the_schedule() -> None:
    plain, warm = OptimizerRecipe(lr=0.1), OptimizerRecipe(lr=0.1, warmup_steps=4)
    for step, factor in enumerate((0.2, 0.4, 0.6, 0.8, 1.0, 1.0)):
        assert learning_rate(step, 10, warm) == pytest.approx(factor * learning_rate(step, 10, plain))


@pytest.mark.parametrize("warmup", [10, 11, 1000])
def test_a_warm_up_as_long_as_the_run_takes_a_tenth_of_it(warmup: int) -> None:
    plain, warm = OptimizerRecipe(lr=0.1), OptimizerRecipe(lr=0.1, warmup_steps=warmup)
    factors = [learning_rate(step, 10, warm) / learning_rate(step, 10, plain) for step in range(10)]
    assert factors == pytest.approx([0.5, *[1.0] * 9])
