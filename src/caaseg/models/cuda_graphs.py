"""A network's step recorded once on a GPU and replayed.

A ResNet-50 launches some 1,500 kernels a training step, and some 100 in inference. On fast GPUs the processor needs
longer to launch them than the GPU to compute them; what is recorded is one launch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.models.segmenter import Prediction, Segmenter, resized

MOST_SIZES = 16
"""So many sizes of images are recorded by one model; each keeps images and coarse logits."""

UNDISTURBED = "thread_local"
"""By default CUDA ends a recording as soon as any thread asks for memory, such as the one that pins the next images."""


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
    with preserve_state(model):
        with torch.no_grad(), context():
            names = list(model.coarse(images).branches)
        with _undisturbed():
            flat: Any = torch.cuda.make_graphed_callables(_Flat(model, context), (images,), allow_unused_input=True)

    def replay(images: Tensor) -> Prediction:
        logits, *others = flat(images)
        aux = others.pop(0) if model.aux is not None else None
        return Prediction(logits, aux, dict(zip(names, others, strict=True)))

    return replay


class _Size(NamedTuple):
    """What a recording is good for."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None


class _Call(NamedTuple):
    """A recorded call: of what is written into `images` a replay gives `coarse`."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    coarse: Prediction


class CapturedModel(nn.Module):
    """A model for inference on a GPU. The first call of a size runs as ever, the second is recorded, others replayed.

    On a CPU, in training or where gradients are wanted it is the model itself.

    Args:
        model: in the mode that it stays in, with weights that stay where they are.
    """

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        self.model = model
        self.backbone = model.backbone  # whose mean and deviation a Predictor normalizes with
        self._calls: dict[_Size, _Call | None] = {}  # None after the first
        self._pool: Any = None  # of all recordings: they run one after the other

    def forward(self, images: Tensor) -> Prediction:
        if not images.is_cuda or torch.is_grad_enabled() or self.model.training:
            return self.model(images)  # type: ignore[no-any-return]
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        size = _Size(images.shape, images.stride(), images.dtype, images.device, autocast)
        if size not in self._calls:
            if len(self._calls) < MOST_SIZES:
                self._calls[size] = None
            return self.model(images)  # type: ignore[no-any-return]
        call = self._calls[size]
        if call is None:
            call = self._calls[size] = self._record(images)
        call.images.copy_(images)
        call.graph.replay()
        return resized(call.coarse, images.shape[2:])  # which the next replay does not overwrite

    def _record(self, images: Tensor) -> _Call:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, images = torch.cuda.CUDAGraph(), images.clone()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=UNDISTURBED):
            torch.clear_autocast_cache()  # casts of weights belong to the recording, not to what was before it
            coarse = self.model.coarse(images)
            torch.clear_autocast_cache()
        return _Call(graph, images, coarse)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Recordings made inside are not spoilt by other threads: `make_graphed_callables` has no option for it."""
    usual = torch.cuda.graph
    torch.cuda.graph = partial(usual, capture_error_mode=UNDISTURBED)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.cuda.graph = usual  # type: ignore[misc]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """What is computed inside leaves no trace in running statistics, nor in random numbers."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = {buffer.device for buffer in buffers if buffer.is_cuda}
    with torch.random.fork_rng(list(devices)):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
