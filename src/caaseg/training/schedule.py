"""The learning rate, a pure function of the step: whatever was killed or resumed, the same step has the same one."""

import math

from caaseg.config import OptimizerRecipe


def learning_rate(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """The learning rate of a step, counted from 0, of a run of so many steps.

    The warm-up is a factor on the schedule, not before it: it rises to 1 in the step that ends it.
    """
    left = 1 - step / steps
    fall = left**recipe.power if recipe.schedule == "poly" else (1 - math.cos(math.pi * left)) / 2
    rise = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    return recipe.lr * fall * rise
