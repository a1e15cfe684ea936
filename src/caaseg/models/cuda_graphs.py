"""CUDA graphs: capture a model's kernels once and replay them with a single launch.

A ResNet-50 launches about 1,500 kernels per training step, and about 100 in inference. With a fast GPU, the CPU takes
longer to launch them than the GPU takes to run them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.models.segmenter import Prediction, Segmenter, resize_prediction

MAX_SIZES = 16
"""Maximum number of image sizes that one model captures; each holds memory for images and coarse logits."""

CAPTURE_MODE = "thread_local"
"""By default a capture fails if another thread allocates memory, such as the thread that pins the next images."""


def _optional(prediction: Prediction) -> tuple[Tensor | None, ...]:
    """Return the optional outputs of a model, in the order in which they are captured."""
    return prediction.aux, prediction.regularized, prediction.presence


class _Flat(nn.Module):
    """Return the coarse prediction as a tuple of tensors, the only type of output that torch captures."""

    def __init__(self, model: Segmenter, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model = model
        self.context = context

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        with self.context():
            torch.clear_autocast_cache()  # casts of weights must be part of the graph
            prediction = self.model.coarse(images)
            torch.clear_autocast_cache()
        optional = [output for output in _optional(prediction) if output is not None]
        return (prediction.logits, *optional, *prediction.branches.values())


def capture_coarse(
    model: Segmenter, images: Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[Tensor], Prediction]:
    """Capture forward and backward pass of `model.coarse` for images of one size.

    Args:
        model: model on a GPU, in its final mode.
        images: example of the size of all later images, (N, 3, H, W).
        context: context of the forward pass, such as autocast.

    Returns:
        The replacement of `model.coarse`. Each call overwrites the output of the previous call, and its backward pass
        may overwrite the gradients of the previous one: set gradients to None in between.
    """
    # A graph accumulates gradients on its own stream, which torch would warn about.
    set_warning = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warning is not None:
        set_warning(False)
    with preserve_state(model):
        with torch.no_grad(), context():
            example = model.coarse(images)
            names, present = list(example.branches), [output is not None for output in _optional(example)]
            del example
        with _thread_local_capture():
            flat: Any = torch.cuda.make_graphed_callables(_Flat(model, context), (images,), allow_unused_input=True)

    def replay(images: Tensor) -> Prediction:
        logits, *others = flat(images)
        aux, regularized, presence = (others.pop(0) if is_present else None for is_present in present)
        return Prediction(logits, aux, dict(zip(names, others, strict=True)), regularized, presence)

    return replay


class _Key(NamedTuple):
    """Properties of the input that a graph was captured for."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None


class _Capture(NamedTuple):
    """A captured call: a replay reads `images` and writes `coarse`."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    coarse: Prediction


class CapturedModel(nn.Module):
    """A model for inference on a GPU that captures one CUDA graph per image size.

    For each image size, the first call runs eagerly, the second call captures a graph, and later calls replay it.
    On a CPU, in training mode or with gradients enabled, all calls run eagerly.

    Args:
        model: model in its final mode; do not move its weights afterwards.
    """

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        self.model = model
        self.backbone = model.backbone  # a Predictor reads the mean and std
        self.config = model.config  # a Predictor reads the size of the training images
        self._captures: dict[_Key, _Capture | None] = {}  # None after the first call
        self._pool: Any = None  # shared memory pool: graphs run one after the other

    def forward(self, images: Tensor) -> Prediction:
        if not images.is_cuda or torch.is_grad_enabled() or self.model.training:
            return self.model(images)  # type: ignore[no-any-return]
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = _Key(images.shape, images.stride(), images.dtype, images.device, autocast)
        if key not in self._captures:
            if len(self._captures) < MAX_SIZES:
                self._captures[key] = None
            return self.model(images)  # type: ignore[no-any-return]
        call = self._captures[key]
        if call is None:
            call = self._captures[key] = self._capture(images)
        call.images.copy_(images)
        call.graph.replay()
        return resize_prediction(call.coarse, images.shape[2:])  # a copy, which the next replay does not overwrite

    def _capture(self, images: Tensor) -> _Capture:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, images = torch.cuda.CUDAGraph(), images.clone()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=CAPTURE_MODE):
            torch.clear_autocast_cache()  # casts of weights must be part of the graph
            coarse = self.model.coarse(images)
            torch.clear_autocast_cache()
        return _Capture(graph, images, coarse)


@contextmanager
def _thread_local_capture() -> Iterator[None]:
    """Set the capture mode of `make_graphed_callables`, which has no option for it."""
    original = torch.cuda.graph
    torch.cuda.graph = partial(original, capture_error_mode=CAPTURE_MODE)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.cuda.graph = original  # type: ignore[misc]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers, such as running statistics, and random number generators afterwards."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = {buffer.device for buffer in buffers if buffer.is_cuda}
    with torch.random.fork_rng(list(devices)):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
