"""Joint transforms of image and label: random augmentation for training, padding for evaluation. All uint8.

Rotation is the first transform, and applies to the whole image.

Random scale and crop are done without building the scaled image: only the source window that the crop shows is read
and resized, so the cost is the same at every scale. The grid of the scaled image starts at the corner of that window,
on an integer source pixel. The result equals scaling and then cropping, except in the outermost row and column of the
crop (several above scale 3), where the filter does not see pixels outside the window.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from caaseg.config import Augmentation
from caaseg.data.sample import IGNORE, Sample
from caaseg.errors import CaasegError

GRAY = 128
"""Padding value of images."""

UNIT = 1024
"""Scales are integer multiples of 1/UNIT, so that lengths and positions are exact integers."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LUMA = (0.299, 0.587, 0.114)
RGB_TO_YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))  # luma and two color differences
BRIGHTNESS_PROBABILITY = 0.5
MAX_BLUR = 2.0  # standard deviation in pixels


class AugmentationParams(NamedTuple):
    """Random parameters of one augmented sample."""

    scale: int  # in 1/UNIT
    down: float  # vertical position of the crop in its possible range, 0 to 1
    right: float  # horizontal position
    flip: bool
    brightness: float  # added to every value
    contrast: float  # factor of the difference from mid-gray
    saturation: float  # factor of the difference from gray of the same luma
    hue: float = 0.0  # rotation of the colors around gray, as a fraction of the circle
    blur: float = 0.0  # standard deviation in pixels of the crop
    rotation: float = 0.0  # degrees, counterclockwise


def draw_params(augmentation: Augmentation, rng: np.random.Generator) -> AugmentationParams:
    """Draw random parameters. Each parameter has its own random number, so that no option changes the others."""
    # Numbers for new options must be drawn last, so that the existing options keep theirs.
    scale, down, right, flip, bright, brightness, contrast, saturation, *others = rng.random(13).tolist()
    hue, grayscale, blurred, blur, rotation = others
    return AugmentationParams(
        scale=_scale_at(augmentation, scale),
        down=down,
        right=right,
        flip=flip < augmentation.flip,
        brightness=augmentation.brightness * (2 * brightness - 1) if bright < BRIGHTNESS_PROBABILITY else 0.0,
        contrast=1 + augmentation.contrast * (2 * contrast - 1),
        saturation=0.0 if grayscale < augmentation.grayscale else 1 + augmentation.saturation * (2 * saturation - 1),
        hue=augmentation.hue * (2 * hue - 1),
        blur=MAX_BLUR * blur if blurred < augmentation.blur else 0.0,
        rotation=augmentation.rotation * (2 * rotation - 1),
    )


def _scale_at(augmentation: Augmentation, quantile: float) -> int:
    smallest, largest = augmentation.scales
    if augmentation.scale_step is None:
        return round((smallest + quantile * (largest - smallest)) * UNIT)
    steps = int((largest - smallest) / augmentation.scale_step + 1e-6) + 1
    return round((smallest + int(quantile * steps) * augmentation.scale_step) * UNIT)


def augment(sample: Sample, params: AugmentationParams, crop: tuple[int, int]) -> Sample:
    """Return the augmented sample of size `crop`: antialiased bilinear image, nearest-neighbor label."""
    image, label = torch.empty((3, *crop), dtype=torch.uint8), torch.empty(crop, dtype=torch.uint8)
    augment_into(sample, params, image, label)
    return Sample(image, label, sample.name)


def augment_into(sample: Sample, params: AugmentationParams, image: Tensor, label: Tensor) -> None:
    """Write the augmented sample to `image` (3, H, W) and `label` (H, W), both uint8, of the crop size."""
    sample = rotate(sample, params.rotation)
    rows, columns = windows(sample.label.shape, params, (label.shape[0], label.shape[1]))

    pixels = sample.image[:, rows.source, columns.source]
    scale = _scale(sample.label.shape, params)
    if scale != UNIT:
        window = pixels[None].contiguous(memory_format=torch.channels_last)  # makes resizing twice as fast
        pixels = F.interpolate(window, scale_factor=scale / UNIT, mode="bilinear", antialias=True)[0]
        pixels = pixels[:, : len(rows.nearest), : len(columns.nearest)]  # the window was rounded up to integer pixels
    pixels = _blur(_jitter_color(pixels, params), params.blur)
    target, nearest = columns.target, columns.nearest
    if params.flip:
        pixels, nearest = pixels.flip(-1), nearest[::-1]
        target = slice(label.shape[1] - target.stop, label.shape[1] - target.start)

    if pixels.shape != image.shape:
        image.fill_(GRAY)
        label.fill_(IGNORE)
    image[:, rows.target, target] = pixels
    label.numpy()[rows.target, target] = sample.label.numpy()[rows.nearest][:, nearest]  # faster than torch indexing


def rotate(sample: Sample, degrees: float) -> Sample:
    """Rotate a sample around its center, at the same size: bilinear image, nearest-neighbor label.

    Corners that the image does not cover are IGNORE and have the mean color of the image.
    """
    if degrees == 0:
        return sample
    mean = sample.image.flatten(1).float().mean(1).round().int().tolist()
    image = _as_pil(sample.image).rotate(degrees, Image.Resampling.BILINEAR, fillcolor=tuple(mean))
    label = Image.fromarray(sample.label.numpy()).rotate(degrees, Image.Resampling.NEAREST, fillcolor=IGNORE)
    return Sample(_as_tensor(image), torch.from_numpy(np.array(label)), sample.name)


def _blur(image: Tensor, std: float) -> Tensor:
    return image if std == 0 else _as_tensor(_as_pil(image).filter(ImageFilter.GaussianBlur(std)))


def _as_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class AxisWindow(NamedTuple):
    """Source range of one axis and its position in the crop."""

    source: slice
    target: slice
    nearest: NDArray[np.int64]  # source pixel at the center of each target pixel
    scale: int  # in 1/UNIT; UNIT if the axis is not resampled


def windows(size: Sequence[int], params: AugmentationParams, crop: tuple[int, int]) -> tuple[AxisWindow, AxisWindow]:
    """Return the windows of rows and columns that a crop shows of an image of a size (H, W)."""
    scale = _scale(size, params)
    return _axis_window(size[0], crop[0], scale, params.down), _axis_window(size[1], crop[1], scale, params.right)


def _scale(size: Sequence[int], params: AugmentationParams) -> int:
    return max(params.scale, -(-UNIT // min(size)))  # keep at least one pixel


def _axis_window(length: int, crop: int, scale: int, position: float) -> AxisWindow:
    scaled = length * scale // UNIT
    if scaled <= crop:
        start = int(position * (crop - scaled + 1))
        source, target = slice(0, length), slice(start, start + scaled)
    else:
        window = -(-crop * UNIT // scale)  # source pixels that the crop shows, the last one perhaps in part
        start = int(position * (length - window + 1))
        source, target = slice(start, start + window), slice(0, crop)
    if (source.stop - source.start) * scale // UNIT == source.stop - source.start:
        scale = UNIT  # interpolate does not resample an axis whose length stays the same, so the label must not either
    centers = 2 * np.arange(target.stop - target.start) + 1  # twice the center of each target pixel
    return AxisWindow(source, target, source.start + centers * UNIT // (2 * scale), scale)


def _jitter_color(image: Tensor, params: AugmentationParams) -> Tensor:
    if (params.brightness, params.contrast, params.saturation, params.hue) == (0, 1, 1, 0):
        return image
    mixing, shift = color_change(params)
    if (params.saturation, params.hue) == (1, 0):  # per channel: a lookup table of 256 values is much faster
        levels = (params.contrast * np.arange(256) + shift).round().clip(0, 255).astype(np.uint8)
        pixels = image.permute(1, 2, 0).contiguous()  # (H, W, 3), the memory order of decoders and interpolate
        changed = bytearray(pixels.numpy()).translate(levels.tobytes())
        return torch.frombuffer(changed, dtype=torch.uint8).view(pixels.shape).permute(2, 0, 1)
    mixed = (mixing @ image.flatten(1).float()).add_(shift)
    return mixed.round_().clamp_(0, 255).to(torch.uint8).view(image.shape)


def color_change(params: AugmentationParams) -> tuple[Tensor, float]:
    """Return hue, saturation, contrast and brightness as a 3 x 3 matrix of RGB colors and a shift: all are linear."""
    gray = torch.tensor([LUMA] * 3)
    mixing = params.contrast * (params.saturation * torch.eye(3) + (1 - params.saturation) * gray)
    if params.hue != 0:
        mixing = mixing @ _hue_rotation(params.hue)
    return mixing, (1 - params.contrast) * GRAY + params.brightness


def _hue_rotation(turns: float) -> Tensor:
    """Return the 3 x 3 matrix of RGB colors that rotates the two color differences and keeps the luma."""
    to_yiq = torch.tensor(RGB_TO_YIQ)
    cos, sin = math.cos(2 * math.pi * turns), math.sin(2 * math.pi * turns)
    rotation = torch.tensor([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    matrix: Tensor = torch.linalg.solve(to_yiq, rotation @ to_yiq)
    return matrix


def pad(sample: Sample, size: tuple[int, int]) -> Sample:
    """Pad a sample at the right and bottom to `size` (H, W), with mid-gray and IGNORE, for batched evaluation."""
    height, width = sample.label.shape
    if height > size[0] or width > size[1]:
        raise CaasegError(
            f"{sample.name}: {height} x {width} does not fit in {size[0]} x {size[1]}; "
            "pad to the size of the largest image, or evaluate with batch size 1"
        )
    padding = (0, size[1] - width, 0, size[0] - height)  # left, right, top, bottom
    return Sample(F.pad(sample.image, padding, value=GRAY), F.pad(sample.label, padding, value=IGNORE), sample.name)


def normalize(
    images: Tensor,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
) -> Tensor:
    """Normalize uint8 images (N, 3, H, W) to float32 on their device."""
    if images.dtype != torch.uint8:
        raise CaasegError(f"images are {images.dtype}; expected uint8 from a loader; they may already be normalized")
    return images.float().sub_(_levels(mean, images.device)).div_(_levels(std, images.device))


@lru_cache(maxsize=8)  # creating them in every step would wait for the device
def _levels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1) * 255
