"""Random augmentation of a whole batch on the device that holds its images, with the definition of `transforms`.

Scale, crop position, flip, padding, colors, blur and rotation come from the same parameters and windows. Labels are
identical. Images differ by rounding, because the filters here compute in float32, and those for a CPU in fixed point.

A batch has a few kernels in all, not per sample, except for the windows and the rotations of its samples. Nothing waits
for the device.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caaseg.data.sample import IGNORE, Batch, Sample
from caaseg.data.transforms import GRAY, UNIT, AugmentationParams, AxisWindow, color_change, windows

BLUR_PASSES = 3  # box filters of Pillow's Gaussian blur
BLUR_TAPS = 2  # on each side: boxes have a radius below 2 pixels for standard deviations up to 2
FIXED_POINT = 1 << 16  # of Pillow's rotation of labels
Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


class AxisTaps(NamedTuple):
    """Source pixels of the crop's pixels along one axis, relative to the source window. T taps per pixel."""

    indices: Tensor  # (N, L, T) int32
    weights: Tensor  # (N, L, T) float32
    nearest: Tensor  # (N, L) int32, for labels
    bounds: Tensor  # (N, 2) int32, first pixel of the crop that shows the image, and the first after it


class BatchPlan(NamedTuple):
    """The random choices for a batch as tensors. It is made on the host, and its tensors are then copied to the device.

    The samples stay on the device.
    """

    samples: tuple[Sample, ...]
    rotations: tuple[float, ...]  # degrees
    windows: tuple[tuple[AxisWindow, AxisWindow], ...]
    rows: AxisTaps
    columns: AxisTaps
    colors: Tensor  # (N, 3, 3) float32
    shifts: Tensor  # (N,) float32
    blurs: Tensor | None  # (N, 5) float32, weights of one box filter; None if nothing is blurred
    flips: Tensor  # (N,) bool

    def pinned(self) -> "BatchPlan":
        """Return the plan in pinned memory, from which copies do not wait."""
        rows, columns = (AxisTaps(*(tensor.pin_memory() for tensor in taps)) for taps in (self.rows, self.columns))
        return self._replace(
            rows=rows,
            columns=columns,
            colors=self.colors.pin_memory(),
            shifts=self.shifts.pin_memory(),
            blurs=None if self.blurs is None else self.blurs.pin_memory(),
            flips=self.flips.pin_memory(),
        )


def plan_batch(samples: Sequence[Sample], params: Sequence[AugmentationParams], crop: tuple[int, int]) -> BatchPlan:
    """Return the windows, filters and colors of a batch. Rotations do not change the size of an image."""
    both = tuple(windows(sample.label.shape, one, crop) for sample, one in zip(samples, params, strict=True))
    changes = [color_change(one) for one in params]
    blurs = [_box_weights(one.blur) for one in params] if any(one.blur for one in params) else None
    return BatchPlan(
        samples=tuple(samples),
        rotations=tuple(one.rotation for one in params),
        windows=both,
        rows=_axis_taps([rows for rows, _ in both], crop[0]),
        columns=_axis_taps([columns for _, columns in both], crop[1]),
        colors=torch.stack([mixing for mixing, _ in changes]),
        shifts=torch.tensor([shift for _, shift in changes]),
        blurs=None if blurs is None else torch.tensor(blurs),
        flips=torch.tensor([one.flip for one in params]),
    )


def augment_batch(plan: BatchPlan) -> Batch:
    """Return the augmented batch, computed on the device of its samples."""
    device = plan.samples[0].image.device

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    rows, columns = (AxisTaps(*map(to_device, taps)) for taps in (plan.rows, plan.columns))
    images, labels = _source_windows(plan)
    images = _filter(images, columns, dim=3)  # the order of torch's own resizing, which rounds in between, too
    images = _filter(images, rows, dim=2)
    images = _change_colors(images, to_device(plan.colors), to_device(plan.shifts))
    if plan.blurs is not None:
        images = _blur(images, to_device(plan.blurs), rows, columns)
    labels = labels.gather(1, _index(rows.nearest[:, :, None], (-1, -1, labels.shape[2])))
    labels = labels.gather(2, _index(columns.nearest[:, None], (-1, labels.shape[1], -1)))

    inside = _inside(rows, images.shape[2])[:, :, None] & _inside(columns, images.shape[3])[:, None]  # (N, H, W)
    images = torch.where(inside[:, None], images, float(GRAY)).to(torch.uint8)
    labels = labels.masked_fill(~inside, IGNORE)
    flips = to_device(plan.flips)
    images = torch.where(flips[:, None, None, None], images.flip(3), images)
    labels = torch.where(flips[:, None, None], labels.flip(2), labels)
    return Batch(images, labels, tuple(sample.name for sample in plan.samples))


def _axis_taps(axes: Sequence[AxisWindow], crop: int) -> AxisTaps:
    """Return the antialiased bilinear filter of each sample. Pixels without image have weights of 0."""
    taps = [2 * math.ceil(max(1, UNIT / axis.scale)) + 1 for axis in axes]
    indices: Integers = np.zeros((len(axes), crop, max(taps)), np.int32)
    weights: Floats = np.zeros((len(axes), crop, max(taps)), np.float32)
    nearest: Integers = np.zeros((len(axes), crop), np.int32)
    for n, axis in enumerate(axes):
        length = axis.source.stop - axis.source.start
        factor = UNIT / axis.scale  # source pixels per pixel of the crop
        support = max(1.0, factor)
        centers = (np.arange(axis.target.stop - axis.target.start)[:, None] + 0.5) * factor
        found = np.floor(centers - support + 0.5).astype(np.int32) + np.arange(taps[n], dtype=np.int32)
        values = np.maximum(0, 1 - abs(found + 0.5 - centers) / support) * ((found >= 0) & (found < length))
        indices[n, axis.target, : taps[n]] = found.clip(0, length - 1)
        weights[n, axis.target, : taps[n]] = values / values.sum(1, keepdims=True)
        nearest[n, axis.target] = axis.nearest - axis.source.start
    bounds = [(axis.target.start, axis.target.stop) for axis in axes]
    on_host = (torch.from_numpy(array) for array in (indices, weights, nearest, np.array(bounds, np.int32)))
    return AxisTaps(*on_host)


def _source_windows(plan: BatchPlan) -> tuple[Tensor, Tensor]:
    """Return the source windows as float32 images (N, 3, H, W) and uint8 labels (N, H, W), padded to one size."""
    height, width = (max(axes[k].source.stop - axes[k].source.start for axes in plan.windows) for k in range(2))
    first = plan.samples[0]
    images = first.image.new_zeros(len(plan.samples), 3, height, width)
    labels = first.label.new_zeros(len(plan.samples), height, width)
    for n, (sample, degrees) in enumerate(zip(plan.samples, plan.rotations, strict=True)):
        rows, columns = plan.windows[n]
        image, label, _ = rotate(sample, degrees)
        window = label[rows.source, columns.source]
        images[n, :, : window.shape[0], : window.shape[1]] = image[:, rows.source, columns.source]
        labels[n, : window.shape[0], : window.shape[1]] = window
    return images.float(), labels


def _filter(images: Tensor, taps: AxisTaps, dim: int) -> Tensor:
    """Filter images (N, 3, H, W) along one axis and round them."""
    result = torch.zeros((), device=images.device)
    for k in range(taps.indices.shape[2]):
        index, weight = taps.indices[:, None, :, k], taps.weights[:, None, :, k]  # (N, 1, L)
        index, weight = (index[:, :, None], weight[:, :, None]) if dim == 3 else (index[..., None], weight[..., None])
        shape = (-1, 3, images.shape[2], -1) if dim == 3 else (-1, 3, -1, images.shape[3])
        result = torch.addcmul(result, images.gather(dim, _index(index, shape)), weight)
    return result.add_(0.5).floor_()


def _index(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    return index.long().expand(shape)


def _change_colors(images: Tensor, colors: Tensor, shifts: Tensor) -> Tensor:
    """Mix the channels of images (N, 3, H, W), add a shift and round."""
    result = shifts[:, None, None, None]
    for channel in range(3):  # not a matrix product: TF32 would be too coarse
        result = torch.addcmul(result, images[:, channel : channel + 1], colors[:, :, channel, None, None])
    return result.round_().clamp_(0, 255)


def _blur(images: Tensor, weights: Tensor, rows: AxisTaps, columns: AxisTaps) -> Tensor:
    """Apply the box filters of Pillow's Gaussian blur, columns first; pixels outside the image repeat its edge."""
    for dim, axis in ((3, columns), (2, rows)):
        positions = torch.arange(images.shape[dim], device=images.device)
        first, last = axis.bounds[:, :1], axis.bounds[:, 1:] - 1
        for _ in range(BLUR_PASSES):
            taps = torch.arange(-BLUR_TAPS, BLUR_TAPS + 1, device=images.device)
            indices = (positions[:, None] + taps).clamp(first[:, :, None], last[:, :, None])  # (N, L, T)
            spread = weights[:, None].expand(indices.shape)
            images = _filter(images, axis._replace(indices=indices, weights=spread), dim)
    return images


def _box_weights(std: float) -> list[float]:
    """Return the weights of one of the box filters that Pillow uses for a Gaussian blur (Gwosdek et al., 2011)."""
    variance = std * std / BLUR_PASSES
    whole = math.floor((math.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    radius = whole + part
    covered = (min(max(radius - abs(tap) + 1, 0), 1) for tap in range(-BLUR_TAPS, BLUR_TAPS + 1))
    return [share / (2 * radius + 1) for share in covered]


def _inside(taps: AxisTaps, crop: int) -> Tensor:
    """Return which pixels along an axis of the crop show the image, (N, L)."""
    positions = torch.arange(crop, device=taps.bounds.device)
    return (positions >= taps.bounds[:, :1]) & (positions < taps.bounds[:, 1:])


def rotate(sample: Sample, degrees: float) -> Sample:
    """Rotate a sample like `transforms.rotate`, on its device."""
    if degrees == 0:
        return sample
    height, width = sample.label.shape
    device = sample.image.device
    radians = -math.radians(degrees % 360)
    cos, sin = math.cos(radians), math.sin(radians)
    x_start = width / 2 - cos * width / 2 - sin * height / 2
    y_start = height / 2 + sin * width / 2 - cos * height / 2

    # Pillow rotates labels with fixed-point positions.
    def fixed(value: float) -> int:
        return math.floor(value * FIXED_POINT + 0.5)

    x, y = torch.arange(width, device=device), torch.arange(height, device=device)[:, None]
    column = (fixed(x_start + (cos + sin) / 2) + fixed(cos) * x + fixed(sin) * y) // FIXED_POINT
    row = (fixed(y_start + (cos - sin) / 2) + fixed(-sin) * x + fixed(cos) * y) // FIXED_POINT
    is_inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    nearest = sample.label[row.clamp(0, height - 1), column.clamp(0, width - 1)]
    label = nearest.masked_fill(~is_inside, IGNORE)

    x_in = cos * (x.double() + 0.5) + sin * (y.double() + 0.5) + x_start
    y_in = -sin * (x.double() + 0.5) + cos * (y.double() + 0.5) + y_start
    is_inside = (x_in >= 0) & (x_in < width) & (y_in >= 0) & (y_in < height)
    left, top = (x_in - 0.5).floor(), (y_in - 0.5).floor()
    right_share, low_share = ((x_in - 0.5) - left).float(), ((y_in - 0.5) - top).float()
    columns = [(left.long() + k).clamp(0, width - 1) for k in (0, 1)]
    rows = [(top.long() + k).clamp(0, height - 1) for k in (0, 1)]
    pixels = sample.image.float()
    upper, lower = (torch.lerp(pixels[:, row, columns[0]], pixels[:, row, columns[1]], right_share) for row in rows)
    mean = pixels.flatten(1).mean(1).round()[:, None, None]
    image = torch.where(is_inside, torch.lerp(upper, lower, low_share).add_(1e-3).floor_(), mean)
    return Sample(image.to(torch.uint8), label, sample.name)
