"""Exponential moving average (EMA) of a model's weights."""

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn

from caaseg.models import Segmenter


class EMA:
    """A copy of a model whose weights and buffers follow another model: ema = decay * ema + (1 - decay) * model.

    The buffers include the statistics of batch norm.

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

    @torch.no_grad()
    def recompute_batch_norm(
        self, model: Segmenter, batches: Iterable[Tensor], forward: Callable[[Tensor], object]
    ) -> None:
        """Recompute the batch norm statistics of the EMA weights, as means over batches.

        `torch.optim.swa_utils.update_bn` does the same. Here all other modules stay in evaluation mode, so dropout
        needs no random numbers. Statistics of frozen batch norm are not recomputed.

        Args:
            model: the model in training, whose modules have the same names.
            batches: images of training batches.
            forward: runs `self.model` on a batch.
        """
        trained = {name for name, module in model.named_modules() if module.training}
        norms = [
            module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and name in trained
        ]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch then computes the mean over all batches
            norm.train()
        for images in batches:
            forward(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        self.model.eval()
