"""A network's step recorded once on a GPU and replayed.

A ResNet-50 launches some 1,500 kernels a training step. On fast GPUs the processor needs longer to launch them than the
GPU to compute them; a recorded step is one launch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from caaseg.models.segmenter import Prediction, Segmenter


class _Flat(nn.Module):
    """The coarse prediction as plain tensors: a recording knows no other results."""

    def __init__(self, model: Segmenter, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model = model
        self.context = context

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        with self.context():
            torch.clear_autocast_cache()  # casts of weights belong to the recording, not to what was before it
            prediction = self.model.coarse(images)
            torch.clear_autocast_cache()
        aux = () if prediction.aux is None else (prediction.aux,)
        return (prediction.logits, *aux, *prediction.branches.values())


def recorded(
    model: Segmenter, images: Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[Tensor], Prediction]:
    """`model.coarse` for images of one size, forward and backward recorded. What it gives is overwritten by the next.

    Args:
        model: on a GPU, in the mode that it stays in.
        images: of the size of all that will come, (N, 3, H, W).
        context: what the network is computed in, such as autocast.
    """
    # A recording keeps the places of gradients that it was made with, on a stream of its own. Torch would warn of it.
    quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if quiet is not None:
        quiet(False)
    with untouched(model):
        with torch.no_grad(), context():
            names = list(model.coarse(images).branches)
        flat: Any = torch.cuda.make_graphed_callables(_Flat(model, context), (images,), allow_unused_input=True)

    def replay(images: Tensor) -> Prediction:
        logits, *others = flat(images)
        aux = others.pop(0) if model.aux is not None else None
        return Prediction(logits, aux, dict(zip(names, others, strict=True)))

    return replay


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What is computed inside leaves no trace in running statistics, nor in random numbers."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = {buffer.device for buffer in buffers if buffer.is_cuda}
    with torch.random.fork_rng(list(devices)):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
