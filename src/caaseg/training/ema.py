"""A running mean of a model's weights, which scores better than the weights themselves while these still jump."""

from copy import deepcopy

import torch
from torch import Tensor

from caaseg.models import Segmenter


class MovingAverage:
    """Keeps a model whose floating-point state follows another's: state = decay * state + (1 - decay) * the other's.

    In the first steps the decay is smaller, so that the random start is soon forgotten. Counters are copied.
    """

    def __init__(self, model: Segmenter, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: Segmenter, step: int) -> None:
        """Take in the weights after a step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        ours, theirs = _tensors(self.model), _tensors(model)
        floating = [name for name, tensor in ours.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([ours[name] for name in floating], [theirs[name] for name in floating], 1 - decay)
        for name in ours.keys() - set(floating):
            ours[name].copy_(theirs[name])


def _tensors(model: Segmenter) -> dict[str, Tensor]:
    return dict(model.state_dict())
