"""Predictor: labels of images of any size, at several scales, flipped, whole or in windows.

An image, or each window of it, is resized to every scale, predicted with and without a flip, and resized back; the
scores are averaged. Windows are then blended with weights that sum to one.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from caaseg.data.decode import image_to_tensor, read_image
from caaseg.data.transforms import IMAGENET_MEAN, IMAGENET_STD, normalize
from caaseg.errors import CaasegError
from caaseg.models.resize import resize
from caaseg.models.segmenter import Prediction
from caaseg.models.windows import OVERLAP, Part, Size, blend_windows, is_tiled

Average = Literal["logits", "probabilities"]
Precision = Literal["32", "bf16"]


class Predictor:
    """Predict images of any size. The model stays on its device, and in its mode.

    Args:
        model: returns a Prediction, or logits (N, K, H, W), for normalized images (N, 3, H, W).
        scales: factors of the image size; the scores at all scales are averaged.
        flip: average with the scores of the horizontally flipped image.
        window: height and width of overlapping windows in pixels of the image, such as the training crop; None predicts
            images whole.
        overlap: minimum share of a window that the next one overlaps.
        average: what to average: logits, as the paper does, or probabilities.
        precision: compute precision of the network: 32, or bf16 by autocast.
        batch_size: maximum number of windows per forward pass, flipped ones included; None for 8 on a GPU and 1 on a
            CPU, where larger batches only take more memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
        window: Size | None = None,
        overlap: float = OVERLAP,
        average: Average = "logits",
        precision: Precision = "32",
        batch_size: int | None = None,
    ) -> None:
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise CaasegError(f"scales are {tuple(scales)}; expected one or more factors above 0, such as (0.75, 1.0)")
        if window is not None and min(window) < 1:
            raise CaasegError(f"window is {window[0]} x {window[1]}; expected at least 1 on each side")
        if not 0 <= overlap < 1:
            raise CaasegError(f"overlap is {overlap}; expected a share of the window, 0 or more and below 1")
        for option, value, known in (("average", average, Average), ("precision", precision, Precision)):
            if value not in get_args(known):
                raise CaasegError(f"{option} is {value!r}; expected {' or '.join(get_args(known))}")
        if batch_size is not None and batch_size < 1:
            raise CaasegError(f"batch_size is {batch_size}; expected 1 or more")
        self.model = model
        self.scales = tuple(scales)
        self.flip = flip
        self.window = window
        self.overlap = overlap
        self.average: Average = average
        self.precision: Precision = precision
        self.batch_size = batch_size
        backbone = getattr(model, "backbone", model)
        self._mean = getattr(backbone, "mean", IMAGENET_MEAN)
        self._std = getattr(backbone, "std", IMAGENET_STD)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))

    def __call__(self, image: Image.Image | NDArray[np.uint8] | str | Path) -> NDArray[np.uint8]:
        """Return the class of each pixel, (H, W).

        Args:
            image: a Pillow image, a uint8 array of shape (H, W), (H, W, 3) or (H, W, 4), or a file.
        """
        labels = self.scores(_pixels(image)[None]).argmax(1)[0]
        return labels.to(torch.uint8).cpu().numpy()

    def scores(self, images: Tensor) -> Tensor:
        """Return the mean logits or probabilities of uint8 images, on the model's device.

        (N, 3, H, W) -> (N, K, H, W).
        """
        size = (images.shape[2], images.shape[3])
        if self.window is None or not is_tiled(size, self.window):
            return self._scores_of_whole(images)
        result = torch.empty(0)
        for n, image in enumerate(images):
            for rows, columns, scores in self.parts(image, self.window):
                if not len(result):
                    result = scores.new_empty(len(images), len(scores), *size)
                result[n, :, rows, columns] = scores
        return result

    def parts(self, image: Tensor, window: Size, *, shifted: bool = False) -> Iterator[Part]:
        """Yield the scores of a uint8 image (3, H, W) part by part, in bounded memory.

        Args:
            image: uint8, (3, H, W).
            window: height and width of the windows; a smaller image is one window.
            shifted: shift the grid of windows by half a step.
        """
        batch_size = self.batch_size or (8 if self.device.type == "cuda" else 1)
        windows = max(1, batch_size // (1 + self.flip))
        return blend_windows(
            self._scores_of_whole, image, window, overlap=self.overlap, shifted=shifted, batch_size=windows
        )

    def _scores_of_whole(self, images: Tensor) -> Tensor:
        """Return the mean over scales and flips: (N, 3, H, W) uint8 -> (N, K, H, W)."""
        size = images.shape[2:]
        with torch.inference_mode(), _evaluation_mode(self.model):
            inputs = normalize(images.to(self.device, non_blocking=True), self._mean, self._std)
            total = torch.zeros((), device=self.device)
            for scale in self.scales:
                view = _resize_to(inputs, (scaled(size[0], scale), scaled(size[1], scale)))
                total = total + _resize_to(self._forward(view), size)
            return total / len(self.scales)

    def _forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of normalized images, averaged with those of the flipped images."""
        if self.flip:
            inputs = torch.cat([inputs, inputs.flip(-1)])
        inputs = inputs.contiguous(memory_format=torch.channels_last)  # the fastest layout for convolutions
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            output: Any = self.model(inputs)
        logits: Tensor = output.logits if isinstance(output, Prediction) else output
        scores = logits.float() if self.average == "logits" else logits.float().softmax(1)
        if not self.flip:
            return scores
        straight, flipped = scores.chunk(2)
        return (straight + flipped.flip(-1)) / 2


def scaled(length: int, scale: float) -> int:
    """Return the length of a side at a scale. Odd lengths stay odd, which keeps corners on the feature grid."""
    if length % 2:
        return 2 * round((length - 1) / 2 * scale) + 1
    return max(1, round(length * scale))


def _resize_to(images: Tensor, size: Sequence[int]) -> Tensor:
    return images if images.shape[2:] == tuple(size) else resize(images, size)


def _pixels(image: Image.Image | NDArray[np.uint8] | str | Path) -> Tensor:
    """Return the image as (3, H, W) uint8, RGB, with its EXIF rotation applied."""
    if isinstance(image, Image.Image):
        return image_to_tensor(image, "the image")
    if isinstance(image, np.ndarray):
        shape = image.shape
        if image.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))) or 0 in shape:
            raise CaasegError(
                f"the image is an array of {image.dtype} of shape {shape}; "
                "expected uint8 of shape (H, W), (H, W, 3) or (H, W, 4)"
            )
        return image_to_tensor(Image.fromarray(image), "the image")
    return read_image(Path(image))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of each submodule afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
