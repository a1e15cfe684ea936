"""Optimizers and the learning-rate schedule."""

import logging
import math

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from caaseg.config import OptimizerRecipe
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone

logger = logging.getLogger(__name__)


BACKBONE, NETWORK = "backbone.", "backbone.net."
"""Prefixes of parameter names: of the backbone, and of the timm network in it."""


def make_optimizer(model: nn.Module, recipe: OptimizerRecipe, *, fused: bool = False) -> Optimizer:
    """Create the optimizer of a recipe.

    Weight decay applies to kernels only, and not to position embeddings and tokens. Parameters outside the backbone
    have a learning rate factor; those of the backbone have one per layer.
    """
    factors, not_decayed = _layer_factors(model, recipe.layer_decay), _names_without_weight_decay(model)
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        in_backbone, is_kernel = name.startswith(BACKBONE), parameter.ndim > 1 and name not in not_decayed
        factor = factors.get(name, 1.0) if in_backbone else recipe.head_lr_factor
        groups.setdefault((in_backbone, is_kernel, factor), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if is_kernel and (recipe.decay_backbone or not in_backbone) else 0.0,
            "factor": factor,
        }
        for (in_backbone, is_kernel, factor), parameters in groups.items()
    ]
    if recipe.name == "rmsprop":
        return RMSprop(settings, lr=recipe.lr)  # torch has no fused kernel for it
    if recipe.name in ("adam", "adamw"):
        return (Adam if recipe.name == "adam" else AdamW)(settings, lr=recipe.lr, fused=fused)
    return SGD(settings, lr=recipe.lr, momentum=recipe.momentum, fused=fused)


def _layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the learning rate factors of the backbone: decay ** (number of layers up to the head)."""
    if decay == 1:
        return {}
    if not isinstance(model.backbone, TimmBackbone):
        raise CaasegError(f"optimizer.layer_decay is {decay}, but needs a timm backbone; use 1")
    layers = model.backbone.layers(coarse=False, option="optimizer.layer_decay")
    head = max(layers.values()) + 1
    return {NETWORK + name: decay ** (head - layer) for name, layer in layers.items()}


def _names_without_weight_decay(model: nn.Module) -> set[str]:
    backbone = getattr(model, "backbone", None)
    names = backbone.names_without_weight_decay() if isinstance(backbone, TimmBackbone) else ()
    return {NETWORK + name for name in names}


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, each times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def learning_rate(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Return the learning rate of a step, counted from 0. A resumed run has the same learning rates.

    The warm-up multiplies the schedule: its factor reaches 1 in the step after the last warm-up step.
    """
    remaining = 1 - step / steps
    decay: dict[str, float] = {
        "poly": remaining**recipe.power,
        "cosine": (1 - math.cos(math.pi * remaining)) / 2,
        "exponential": recipe.final_lr_factor ** (1 - remaining),
    }
    return recipe.lr * decay[recipe.schedule] * min(1.0, (step + 1) / (warmup_steps(steps, recipe) + 1))


def warmup_steps(steps: int, recipe: OptimizerRecipe) -> int:
    """Return the length of the warm-up: that of the recipe if it is shorter than the run, and 10% of the run if not."""
    return recipe.warmup_steps if recipe.warmup_steps < steps else steps // 10


def warn_about_warmup(steps: int, recipe: OptimizerRecipe) -> None:
    """Log that the warm-up was shortened, if it was."""
    shortened = warmup_steps(steps, recipe)
    if shortened != recipe.warmup_steps:
        logger.warning(
            "optimizer.warmup_steps is %d, but the run has %d steps: the warm-up is shortened to %d steps",
            recipe.warmup_steps,
            steps,
            shortened,
        )
