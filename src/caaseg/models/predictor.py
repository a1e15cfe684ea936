"""Prediction of images of any size, at several scales, with flips, whole or in windows.

An image is first resized to the size at which the model was trained, if it differs. The whole image, or each of its
windows, is resized to every scale, predicted with and without a flip, and resized back; the scores are averaged.
Windows are then blended with weights that sum to one, and the scores are resized to the size of the image.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from caaseg.data.decode import image_to_tensor, read_image
from caaseg.data.transforms import GRAY, IMAGENET_MEAN, IMAGENET_STD, normalize
from caaseg.errors import CaasegError
from caaseg.models.image_size import (
    ImageSize,
    ShortSides,
    check_image_size,
    prediction_size,
    resize_images,
    resized_parts,
)
from caaseg.models.resize import resize
from caaseg.models.windows import OVERLAP, Part, Size, blend_windows, is_tiled, labels_from_parts

Average = Literal["logits", "probabilities"]
Precision = Literal["32", "bf16"]

WINDOW = (513, 513)
"""Window of images that are too large to be predicted whole: the default training crop."""
MAX_WHOLE_PIXELS = 2048 * 2048
"""Larger images are tiled. With more than FEW_CLASSES classes the limit is proportionally lower."""
FEW_CLASSES = 32
ACCEPTED = (
    "a path, a Pillow image, a uint8 array of shape (H, W), (H, W, 3) or (H, W, 4), a uint8 tensor of shape "
    "(3, H, W), or a list or generator of these"
)


class Predictor:
    """Predict images of any size. The device and the mode of the model do not change.

    Args:
        model: returns a Prediction, or logits (N, K, H, W), for normalized images (N, 3, H, W).
        size: size at which images are predicted: auto for that of the training images, native for their own, the
            length of the short side, or height and width.
        scales: factors of the image size; the scores at all scales are averaged.
        flip: average with the scores of the horizontally flipped image.
        window: height and width of overlapping windows in pixels of the resized image, such as the training crop;
            None predicts images whole, except those of more than 2048 x 2048 pixels.
        overlap: minimum share of a window that the next one overlaps.
        average: average logits, as the paper does, or probabilities.
        precision: compute precision of the network: 32, or bf16 by autocast.
        batch_size: maximum number of windows per forward pass, including flipped windows; None for 8 on a GPU and 1 on
            a CPU, where larger batches only take more memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        size: ImageSize = "auto",
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
        window: Size | None = None,
        overlap: float = OVERLAP,
        average: Average = "logits",
        precision: Precision = "32",
        batch_size: int | None = None,
    ) -> None:
        check_image_size(size)
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
        self.size: ImageSize = size
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
        config = getattr(getattr(model, "model", model), "config", None)  # of a captured model, or of the model itself
        self._min_size: Size = getattr(config, "min_size", None) or (1, 1)
        sides = getattr(config, "short_sides", None)
        self._short_sides = None if sides is None else ShortSides(*sides)
        self.num_outputs: int | None = None  # number of channels of the scores, known after the first prediction
        self._num_classes: int = getattr(config, "num_classes", FEW_CLASSES)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))

    def __call__(self, image: Image.Image | NDArray[np.uint8] | Tensor | str | Path) -> NDArray[np.uint8]:
        """Return the class of each pixel, (H, W).

        Args:
            image: a Pillow image, a uint8 array of shape (H, W), (H, W, 3) or (H, W, 4), a uint8 tensor of shape
                (3, H, W), or a file.

        Returns:
            Class ids, (H, W) uint8.
        """
        pixels = read_pixels(image)
        size = (pixels.shape[1], pixels.shape[2])
        return labels_from_parts(self.parts(pixels), size).numpy()

    def labels(self, images: Tensor) -> Tensor:
        """Return the classes of uint8 images, (N, 3, H, W) -> (N, H, W), uint8 on the model's device."""
        size = (images.shape[2], images.shape[3])
        if self.predicts_whole(size):
            return self._scores_of_whole(images).argmax(1).to(torch.uint8)
        return torch.stack([labels_from_parts(self.parts(image), size) for image in images]).to(self.device)

    def scores(self, images: Tensor) -> Tensor:
        """Return the mean logits or probabilities of uint8 images, on the model's device.

        (N, 3, H, W) -> (N, K, H, W).
        """
        size = (images.shape[2], images.shape[3])
        if self.predicts_whole(size):
            return self._scores_of_whole(images)
        return torch.stack([_assemble(self.parts(image), size) for image in images])

    def predicted_size(self, size: Size) -> Size:
        """Return the height and width at which images of this height and width are predicted."""
        return prediction_size(size, self.size, self._short_sides)

    def predicts_whole(self, size: Size) -> bool:
        """Return whether images of this height and width are neither resized nor tiled."""
        return self.predicted_size(size) == size and not self.is_tiled(size)

    def is_tiled(self, size: Size) -> bool:
        """Return whether images of this height and width are predicted in windows."""
        inner = self.predicted_size(size)
        return is_tiled(inner, self._window(inner))

    def parts(self, image: Tensor, *, shifted: bool = False) -> Iterator[Part]:
        """Yield the scores of a uint8 image (3, H, W) part by part, in bounded memory.

        Args:
            image: uint8, (3, H, W).
            shifted: shift the grid of windows by half a step.
        """
        size = (image.shape[1], image.shape[2])
        inner = self.predicted_size(size)
        batch_size = self.batch_size or (8 if self.device.type == "cuda" else 1)
        parts = blend_windows(
            self._scores_of_whole,
            resize_images(image[None], inner)[0],
            self._window(inner),
            overlap=self.overlap,
            shifted=shifted,
            batch_size=max(1, batch_size // (1 + self.flip)),
        )
        return parts if inner == size else resized_parts(_assemble(parts, inner), size)

    def _window(self, size: Size) -> Size:
        """Return the window for a resized image; its own size if it is predicted whole."""
        fits = size[0] * size[1] * max(FEW_CLASSES, self._num_classes) <= MAX_WHOLE_PIXELS * FEW_CLASSES
        return self.window or (size if fits else WINDOW)

    def _scores_of_whole(self, images: Tensor) -> Tensor:
        """Return the mean over scales and flips: (N, 3, H, W) uint8 -> (N, K, H, W)."""
        size = images.shape[2:]
        with torch.inference_mode(), _evaluation_mode(self.model):
            padded = _pad_to(images.to(self.device, non_blocking=True), self._min_size)
            inputs = normalize(padded, self._mean, self._std)
            height, width = inputs.shape[2:]
            total = torch.zeros((), device=self.device)
            for scale in self.scales:
                view = _resize_to(inputs, (scaled(height, scale), scaled(width, scale)))
                total = total + _resize_to(self._forward(view), (height, width))
            self.num_outputs = total.shape[1]
            return total[:, :, : size[0], : size[1]] / len(self.scales)

    def _forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of normalized images, averaged with those of the flipped images."""
        if self.flip:
            inputs = torch.cat([inputs, inputs.flip(-1)])
        inputs = inputs.contiguous(memory_format=torch.channels_last)  # the fastest layout for convolutions
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            output: Any = self.model(inputs)
        logits: Tensor = getattr(output, "logits", output)
        scores = logits.float() if self.average == "logits" else logits.float().softmax(1)
        if not self.flip:
            return scores
        unflipped, flipped = scores.chunk(2)
        return (unflipped + flipped.flip(-1)) / 2


def _assemble(parts: Iterable[Part], size: Size) -> Tensor:
    """Return the scores of a whole image, (K, H, W)."""
    result = torch.empty(0)
    for rows, columns, scores in parts:
        if not len(result):
            result = scores.new_empty(len(scores), *size)
        result[:, rows, columns] = scores
    return result


def scaled(length: int, scale: float) -> int:
    """Return the length of a side at a scale. Odd lengths stay odd, which keeps corners on the feature grid."""
    if length % 2:
        return 2 * round((length - 1) / 2 * scale) + 1
    return max(1, round(length * scale))


def _pad_to(images: Tensor, size: Size) -> Tensor:
    """Pad uint8 images with gray at the bottom and right to at least a height and width."""
    below, right = max(0, size[0] - images.shape[2]), max(0, size[1] - images.shape[3])
    return F.pad(images, (0, right, 0, below), value=GRAY) if below or right else images


def _resize_to(images: Tensor, size: Sequence[int]) -> Tensor:
    return images if images.shape[2:] == tuple(size) else resize(images, size)


def read_pixels(image: Any) -> Tensor:
    """Return an image as (3, H, W) uint8, RGB, with its EXIF rotation applied."""
    if isinstance(image, str | Path):
        return read_image(Path(image))
    if isinstance(image, Image.Image):
        return image_to_tensor(image, "the image")
    if isinstance(image, np.ndarray):
        shape = image.shape
        if image.dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))) and 0 not in shape:
            return image_to_tensor(Image.fromarray(image), "the image")
        raise CaasegError(f"the image is an array of {image.dtype} of shape {shape}; expected {ACCEPTED}")
    if isinstance(image, Tensor):
        if image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3 and image.numel():
            return image.cpu()
        raise CaasegError(f"the image is a tensor of {image.dtype} of shape {tuple(image.shape)}; expected {ACCEPTED}")
    raise CaasegError(f"the image is of type {type(image).__name__}; expected {ACCEPTED}")


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
