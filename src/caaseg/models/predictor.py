"""A picture in, its labels out: at several scales, mirrored, whole or in windows.

Every step between the network's scores and their mean is linear: windows are blended with weights that sum to one, then
resized to the picture, then averaged over the scales. Pieces of one size, of whatever scale, are batched together.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from caaseg.data.decode import image_to_tensor, read_image
from caaseg.data.transforms import IMAGENET_MEAN, IMAGENET_STD, normalize
from caaseg.models.resize import resize
from caaseg.models.segmenter import Prediction

Average = Literal["logits", "probabilities"]
Precision = Literal["32", "bf16"]
Size = tuple[int, int]


class Window(NamedTuple):
    """A part of a view that the network sees at once."""

    view: int  # which scale it belongs to
    rows: slice
    columns: slice
    weights: Tensor  # (h, w), how much it counts beside the windows that overlap it

    @property
    def size(self) -> Size:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


class Predictor:
    """Labels of pictures of any size. The model stays where it is, and in the mode it is in.

    Args:
        model: what gives a Prediction, or plain logits (N, K, H, W), for normalized images (N, 3, H, W).
        scales: factors of the picture's size; the scores at all of them are averaged.
        flip: average with the scores of the mirrored picture too.
        window: height and width of sliding windows, such as the crop that was trained with; None takes views whole.
        overlap: share of a window that the next one covers again, at least.
        average: what is averaged: logits, as the paper does, or probabilities.
        precision: what the network computes in: 32, or bf16 by autocast.
        batch_size: most pieces that the network sees at once; mirrored ones count too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
        window: Size | None = None,
        overlap: float = 1 / 3,
        average: Average = "logits",
        precision: Precision = "32",
        batch_size: int = 8,
    ) -> None:
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise ValueError(f"scales are {tuple(scales)}; expected one or more factors above 0, such as (0.75, 1.0)")
        if window is not None and min(window) < 1:
            raise ValueError(f"window is {window[0]} x {window[1]}; expected at least 1 on each side")
        if not 0 <= overlap < 1:
            raise ValueError(f"overlap is {overlap}; expected a share of the window, 0 or more and below 1")
        for option, value, known in (("average", average, Average), ("precision", precision, Precision)):
            if value not in get_args(known):
                raise ValueError(f"{option} is {value!r}; expected {' or '.join(get_args(known))}")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        self.model = model
        self.scales = tuple(scales)
        self.flip = flip
        self.window = window
        self.overlap = overlap
        self.average: Average = average
        self.precision: Precision = precision
        self.batch_size = batch_size
        learned = getattr(model, "backbone", model)
        self._mean = getattr(learned, "mean", IMAGENET_MEAN)
        self._std = getattr(learned, "std", IMAGENET_STD)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))

    def __call__(self, image: Image.Image | NDArray[np.uint8] | str | Path) -> NDArray[np.uint8]:
        """The class of each pixel, (H, W), of a picture: Pillow's, an array (H, W), (H, W, 3) or (H, W, 4), a file."""
        labels = self.scores(_pixels(image)[None]).argmax(1)[0]
        return labels.to(torch.uint8).cpu().numpy()

    def scores(self, images: Tensor) -> Tensor:
        """The mean logits, or probabilities, of uint8 images (N, 3, H, W): (N, K, H, W), on the model's device."""
        size = images.shape[2:]
        with torch.inference_mode(), _evaluating(self.model):
            inputs = normalize(images.to(self.device, non_blocking=True), self._mean, self._std)
            views = [_resized(inputs, (scaled(size[0], scale), scaled(size[1], scale))) for scale in self.scales]
            blended: dict[int, Tensor] = {}  # (N, K, h, w) of each view
            for windows in self._batches(views):
                scores = self._scores(torch.cat([views[w.view][..., w.rows, w.columns] for w in windows]))
                for w, part in zip(windows, scores.chunk(len(windows)), strict=True):
                    if w.view not in blended:
                        blended[w.view] = part.new_zeros(*part.shape[:2], *views[w.view].shape[2:])
                    blended[w.view][..., w.rows, w.columns] += w.weights * part
            total = torch.zeros((), device=self.device)
            for view in blended.values():
                total = total + _resized(view, size)
            return total / len(views)

    def _batches(self, views: Sequence[Tensor]) -> Iterator[list[Window]]:
        """The windows of all views, in lists of one size."""
        by_size: dict[Size, list[Window]] = {}
        for index, view in enumerate(views):
            for window in windows_of(index, (view.shape[2], view.shape[3]), self.window, self.overlap, view.device):
                by_size.setdefault(window.size, []).append(window)
        at_once = max(1, self.batch_size // (len(views[0]) * (1 + self.flip)))
        for windows in by_size.values():
            for start in range(0, len(windows), at_once):
                yield windows[start : start + at_once]

    def _scores(self, inputs: Tensor) -> Tensor:
        """What the network says of pieces (N, 3, h, w): (N, K, h, w), the mirrored ones turned back and averaged in."""
        pieces = torch.cat([inputs, inputs.flip(-1)]) if self.flip else inputs
        pieces = pieces.contiguous(memory_format=torch.channels_last)  # what convolutions are fastest in
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            output: Any = self.model(pieces)
        logits: Tensor = output.logits if isinstance(output, Prediction) else output
        scores = logits.float() if self.average == "logits" else logits.float().softmax(1)
        if not self.flip:
            return scores
        straight, mirrored = scores.chunk(2)
        return (straight + mirrored.flip(-1)) / 2


def scaled(length: int, scale: float) -> int:
    """A side of a picture at a scale. An odd one stays odd, so that aligned corners stay on a network's grid."""
    if length % 2:
        return 2 * round((length - 1) / 2 * scale) + 1
    return max(1, round(length * scale))


def windows_of(
    view: int, size: Size, window: Size | None, overlap: float, device: torch.device | str = "cpu"
) -> Iterator[Window]:
    """Windows that cover a view evenly, with weights that sum to one at every pixel.

    Args:
        view: which view they are of.
        size: its height and width.
        window: of the windows; a smaller view is one window.
        overlap: share of a window that the next one covers again, at least.
        device: where the weights are.
    """
    rows = along(size[0], window[0] if window else size[0], overlap)
    columns = along(size[1], window[1] if window else size[1], overlap)
    for top, down in rows:
        for left, right in columns:
            weights = down.to(device)[:, None] * right.to(device)
            yield Window(view, slice(top, top + len(down)), slice(left, left + len(right)), weights)


def along(length: int, window: int, overlap: float, *, shifted: bool = False) -> list[tuple[int, Tensor]]:
    """Along one axis, where windows start and the weights in each, largest in the middle, where a window sees most.

    Shifted, all but the outermost lie half a step further, and one more is needed.
    """
    window = min(window, length)
    step = max(1, int(window * (1 - overlap)))
    number = -(-(length - window) // step) + 1
    starts = [round(k * (length - window) / max(1, number - 1)) for k in range(number)]
    if shifted:
        between = [(start + after) // 2 for start, after in pairwise(starts)]
        starts = sorted({0, *between, length - window})
    at = torch.arange(window, dtype=torch.float64)
    hat = torch.minimum(at, window - 1 - at) + 1
    total = torch.zeros(length, dtype=torch.float64)
    for start in starts:
        total[start : start + window] += hat
    return [(start, (hat / total[start : start + window]).float()) for start in starts]


def _resized(images: Tensor, size: Sequence[int]) -> Tensor:
    return images if images.shape[2:] == tuple(size) else resize(images, size)


def _pixels(image: Image.Image | NDArray[np.uint8] | str | Path) -> Tensor:
    """(3, H, W) uint8, RGB and upright."""
    if isinstance(image, Image.Image):
        return image_to_tensor(image, "the image")
    if isinstance(image, np.ndarray):
        shape = image.shape
        if image.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))) or 0 in shape:
            raise ValueError(
                f"the image is an array of {image.dtype} of shape {shape}; "
                "expected uint8 of shape (H, W), (H, W, 3) or (H, W, 4)"
            )
        return image_to_tensor(Image.fromarray(image), "the image")
    return read_image(Path(image))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each part is in the mode it was in, such as a frozen one amid those that train."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
