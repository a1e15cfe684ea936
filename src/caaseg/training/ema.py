"""Exponential moving average (EMA) of a model's weights."""

from copy import deepcopy

import torch

from caaseg.models import Segmenter


class EMA:
    """A copy of a model whose weights and buffers follow another model: ema = decay * ema + (1 - decay) * model.

    The decay is smaller in the first steps, so that the random initialization is soon forgotten. Integer buffers are
    copied. `torch.optim.swa_utils.AveragedModel` does the same but copies a counter to the GPU in each update, which
    waits for all work on the GPU.
    """

    def __init__(self, model: Segmenter, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: Segmenter, step: int) -> None:
        """Average in the weights after a step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averaged, current = self.model.state_dict(), model.state_dict()
        floating = [name for name, tensor in averaged.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([averaged[name] for name in floating], [current[name] for name in floating], 1 - decay)
        for name in averaged.keys() - set(floating):
            averaged[name].copy_(current[name])
