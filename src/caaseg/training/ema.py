"""Exponential moving average (EMA) of a model's weights."""

from copy import deepcopy

import torch

from caaseg.models import Segmenter


class EMA:
    """A copy of a model whose weights and buffers follow another model: ema = decay * ema + (1 - decay) * model.

    The decay is smaller in the first steps, so that the random initial weights soon lose their influence. Integer
    buffers are copied. `torch.optim.swa_utils.AveragedModel` does the same but copies a counter to the GPU in each
    update, which waits for all work on the GPU.

    Args:
        model: the model to follow.
        decay: largest decay, such as 0.999.
    """

    def __init__(self, model: Segmenter, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: Segmenter, step: int) -> None:
        """Update the EMA weights with the weights after a step; steps count from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        ema, current = self.model.state_dict(), model.state_dict()
        floating = [name for name, tensor in ema.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([ema[name] for name in floating], [current[name] for name in floating], 1 - decay)
        for name in ema.keys() - set(floating):
            ema[name].copy_(current[name])
