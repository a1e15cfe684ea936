"""Batch normalisation folded into the convolutions before it: the same model for inference, in fewer passes.

In evaluation a normalisation is a factor and an addend a channel, and a convolution takes both into its weights. Which
convolution stands before which normalisation is seen by running the model once: the one's output is the other's input.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from caaseg.models.segmenter import Segmenter


def folded(model: Segmenter) -> Segmenter:
    """A copy for inference alone, in evaluation mode; it gives the model's numbers up to rounding."""
    model = copy.deepcopy(model).eval()
    names = {module: name for name, module in model.named_modules()}
    for convolution, norm in _pairs(model):
        fused = fuse_conv_bn_eval(convolution, norm)
        fused.requires_grad_(False)
        _replace(model, names[convolution], fused)
        _replace(model, names[norm], _what_is_left(norm))
    return model


def _pairs(model: Segmenter) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Every convolution whose output goes into a normalisation, and nowhere else."""
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # by the output's id; outputs are kept, so that no id is used again
    found: dict[nn.Conv2d, list[nn.Module]] = {}

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        maker = made.get(id(inputs[0])) if inputs else None
        if maker is not None:
            found.setdefault(maker[0], []).append(module)
        if isinstance(module, nn.Conv2d):
            made[id(output)] = (module, output)

    leaves = [module for module in model.modules() if not list(module.children()) or isinstance(module, nn.BatchNorm2d)]
    hooks = [module.register_forward_hook(after) for module in leaves]
    try:
        with torch.inference_mode():
            parameter = next(model.parameters())
            model.coarse(torch.zeros(1, 3, 64, 64, device=parameter.device, dtype=parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (convolution, readers[0])
        for convolution, readers in found.items()
        if len(readers) == 1 and isinstance(readers[0], nn.BatchNorm2d)
    ]


def _what_is_left(norm: nn.BatchNorm2d) -> nn.Module:
    """Nothing; timm's layers have an activation in them."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) else nn.Identity()


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
