"""Joint transforms of an image and its label: random ones for training, padding for evaluation. uint8 in, uint8 out.

Random scale, then crop, without building the scaled image: only the window that the crop shows is read and resized,
which costs the same at every scale. The grid of the scaled image starts at the window's corner, on a whole pixel of
the source. What comes out is what scaling and then cropping gives, except in the outermost line of pixels of the crop
(lines, above scale 3), where the filter does not see what was cut off.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from caaseg.config import Augmentation
from caaseg.data.sample import IGNORE, Sample

GRAY = 128
"""What is beyond the edge of an image."""

UNIT = 1024
"""Scales are whole numbers of 1/UNIT, so that lengths and positions come out exact in whole numbers."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LUMA = (0.299, 0.587, 0.114)
BRIGHTNESS_PROBABILITY = 0.5


class View(NamedTuple):
    """One draw: how a sample is seen."""

    scale: int  # in 1/UNIT
    down: float  # where the crop lies among all its possible places, 0 to 1
    right: float
    flip: bool
    brightness: float  # added to every value
    contrast: float  # factor of the distance from mid-gray
    saturation: float  # factor of the distance from grey of the same luma


def draw_view(augmentation: Augmentation, rng: np.random.Generator) -> View:
    """Draw how a sample is seen. Each choice has a random number of its own: one option does not change the others."""
    scale, down, right, flip, bright, brightness, contrast, saturation = rng.random(8).tolist()
    return View(
        scale=_draw_scale(augmentation, scale),
        down=down,
        right=right,
        flip=flip < augmentation.flip,
        brightness=augmentation.brightness * (2 * brightness - 1) if bright < BRIGHTNESS_PROBABILITY else 0.0,
        contrast=1 + augmentation.contrast * (2 * contrast - 1),
        saturation=1 + augmentation.saturation * (2 * saturation - 1),
    )


def augment(sample: Sample, augmentation: Augmentation, rng: np.random.Generator) -> Sample:
    """A random view of a sample, of the size of the crop."""
    return view_of(sample, draw_view(augmentation, rng), augmentation.crop)


def _draw_scale(augmentation: Augmentation, chance: float) -> int:
    smallest, largest = augmentation.scales
    if augmentation.scale_step is None:
        return round((smallest + chance * (largest - smallest)) * UNIT)
    steps = int((largest - smallest) / augmentation.scale_step + 1e-6) + 1
    return round((smallest + int(chance * steps) * augmentation.scale_step) * UNIT)


class Span(NamedTuple):
    """What of one axis of the source is read, and where on the crop it lands."""

    source: slice
    target: slice
    nearest: NDArray[np.int64]  # for each place of the target, the place of the source at its middle


def view_of(sample: Sample, view: View, crop: tuple[int, int]) -> Sample:
    """The crop that a view shows: the image bilinear and antialiased, the label by its nearest pixels."""
    image, label = torch.empty((3, *crop), dtype=torch.uint8), torch.empty(crop, dtype=torch.uint8)
    write_view(sample, view, image, label)
    return Sample(image, label, sample.name)


def write_view(sample: Sample, view: View, image: Tensor, label: Tensor) -> None:
    """Write the crop that a view shows into memory of its size: image (3, H, W) and label (H, W), both uint8."""
    height, width = sample.label.shape
    scale = max(view.scale, -(-UNIT // min(height, width)))  # at least one pixel is left
    rows = _span(height, label.shape[0], scale, view.down)
    columns = _span(width, label.shape[1], scale, view.right)

    seen = sample.image[:, rows.source, columns.source]
    if scale != UNIT:
        window = seen[None].contiguous(memory_format=torch.channels_last)  # so it is resized twice as fast
        seen = F.interpolate(window, scale_factor=scale / UNIT, mode="bilinear", antialias=True)[0]
        seen = seen[:, : len(rows.nearest), : len(columns.nearest)]  # the window is a whole number of pixels
    seen = _colored(seen, view)
    target, nearest = columns.target, columns.nearest
    if view.flip:
        seen, nearest = seen.flip(-1), nearest[::-1]
        target = slice(label.shape[1] - target.stop, label.shape[1] - target.start)

    if seen.shape != image.shape:
        image.fill_(GRAY)
        label.fill_(IGNORE)
    image[:, rows.target, target] = seen
    label.numpy()[rows.target, target] = sample.label.numpy()[rows.nearest][:, nearest]  # numpy is quickest at this


def padded(sample: Sample, size: tuple[int, int]) -> Sample:
    """For evaluation in batches: the whole image, unscaled, with mid-gray and IGNORE to its right and below."""
    height, width = sample.label.shape
    if height > size[0] or width > size[1]:
        raise ValueError(
            f"{sample.name}: {height} x {width} does not fit in {size[0]} x {size[1]}; "
            "pad to the size of the largest image, or evaluate images one by one"
        )
    beyond = (0, size[1] - width, 0, size[0] - height)  # left, right, above, below
    return Sample(F.pad(sample.image, beyond, value=GRAY), F.pad(sample.label, beyond, value=IGNORE), sample.name)


def normalize(
    images: Tensor,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
) -> Tensor:
    """uint8 images (N, 3, H, W) as a network takes them, float32, on the device they are on."""
    if images.dtype != torch.uint8:
        raise ValueError(f"images are {images.dtype}; expected uint8, as loaders give them: these may be normalized")
    return images.float().sub_(_levels(mean, images.device)).div_(_levels(std, images.device))


@lru_cache(maxsize=8)  # made anew in each step, they would have it wait for the device
def _levels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1) * 255


def _span(length: int, crop: int, scale: int, place: float) -> Span:
    scaled = length * scale // UNIT
    if scaled <= crop:
        start = int(place * (crop - scaled + 1))
        source, target = slice(0, length), slice(start, start + scaled)
    else:
        window = -(-crop * UNIT // scale)  # pixels of the source that the crop shows, the last of them perhaps in part
        start = int(place * (length - window + 1))
        source, target = slice(start, start + window), slice(0, crop)
    if (source.stop - source.start) * scale // UNIT == source.stop - source.start:
        scale = UNIT  # less than a pixel more: interpolate leaves such an axis as it is, and so must the label be
    middles = 2 * np.arange(target.stop - target.start) + 1  # twice the middle of each pixel of the target
    return Span(source, target, source.start + middles * UNIT // (2 * scale))


def _colored(image: Tensor, view: View) -> Tensor:
    if (view.brightness, view.contrast, view.saturation) == (0, 1, 1):
        return image
    shift = (1 - view.contrast) * GRAY + view.brightness
    if view.saturation == 1:  # each value for itself, and there are but 256: looking them up is many times as fast
        levels = (view.contrast * np.arange(256) + shift).round().clip(0, 255).astype(np.uint8)
        pixels = image.permute(1, 2, 0).contiguous()  # (H, W, 3), as decoders and the resizing leave them
        changed = bytearray(pixels.numpy()).translate(levels.tobytes())
        return torch.frombuffer(changed, dtype=torch.uint8).view(pixels.shape).permute(2, 0, 1)
    # All three are linear, so one matrix does them: towards luma, then away from mid-gray, then a shift.
    grey = torch.tensor([LUMA] * 3)
    mixing = view.contrast * (view.saturation * torch.eye(3) + (1 - view.saturation) * grey)
    mixed = (mixing @ image.flatten(1).float()).add_(shift)
    return mixed.round_().clamp_(0, 255).to(torch.uint8).view(image.shape)
