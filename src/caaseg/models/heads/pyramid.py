"""Convolution and pooling of feature maps of several sizes.

Many heads resize feature maps to a common size, concatenate and convolve them. Resizing multiplies the rows and the
columns of a map by a matrix, so part of it can follow the convolution. Here each map is convolved before its columns
are resized, and the results are added. The numbers are the same, with fewer multiply-adds, and without the resized and
the concatenated maps.

Shapes: N batch, C channels, H x W size of the result, h x w size of a smaller map, O output channels, K kernel size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.attention.projection import projection

EPSILON = 1e-5
"""Epsilon of batch normalization in mmsegmentation."""


class PyramidConvolution(nn.Conv2d):
    """Same-size convolution of several feature maps, as if they were resized and concatenated. The kernel is square."""

    def forward(self, maps: Sequence[Tensor], smaller: Sequence[Tensor] = ()) -> Tensor:  # type: ignore[override]
        """Convolve maps of one size, and smaller maps that are resized to it bilinearly, without aligned corners.

        Args:
            maps: one or more of (N, C, H, W); their channels come first in the weights.
            smaller: (N, C, h, w) each.

        Returns:
            (N, O, H, W).
        """
        end = maps[0].shape[1]
        result = F.conv2d(maps[0], self.weight[:, :end], self.bias, padding=self.padding)
        for features in maps[1:]:
            start, end = end, end + features.shape[1]
            result += F.conv2d(features, self.weight[:, start:end], padding=self.padding)
        for features in smaller:
            start, end = end, end + features.shape[1]
            result += convolve_resized(features, self.weight[:, start:end], maps[0].shape[2:])
        return result


class PyramidProjection(nn.Sequential):
    """Pyramid convolution, batch normalization and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int, eps: float = EPSILON) -> None:
        super().__init__(
            *projection(in_channels, out_channels, kernel_size=kernel_size, kind=PyramidConvolution, eps=eps)
        )

    def forward(self, maps: Sequence[Tensor], smaller: Sequence[Tensor] = ()) -> Tensor:
        """See `PyramidConvolution.forward`."""
        convolution, *rest = self
        result: Tensor = convolution(maps, smaller)
        for module in rest:
            result = module(result)
        return result


def convolve_resized(features: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
    """Return the same-size convolution of a resized map, without computing the resized map.

    Args:
        features: (N, C, h, w).
        weight: (O, C, K, K), with K odd.
        size: height H and width W, to which the map is resized bilinearly, without aligned corners.

    Returns:
        (N, O, H, W), channels last in memory.
    """
    height, width = size
    out, _, kernel_size, _ = weight.shape
    half = kernel_size // 2
    if kernel_size == 1:
        convolved = _resize_rows(F.conv2d(features, weight), height)  # (N, O, H, w)
    else:
        kernels = weight.permute(3, 0, 1, 2).flatten(0, 1).unsqueeze(3)  # (K O, C, K, 1): one column of each kernel
        convolved = F.conv2d(_resize_rows(features, height), kernels, padding=(half, 0))  # (N, K O, H, w)
    columns = convolved.permute(0, 2, 3, 1).reshape(features.shape[0], height, -1, out)  # (N, H, w K, O)
    padded = F.pad(resizing_matrix(features.shape[3], width, columns), (0, 0, half, half))  # (W + K - 1, w)
    matrix = torch.stack([padded[k : k + width] for k in range(kernel_size)], dim=2)  # (W, w, K)
    return (matrix.flatten(1) @ columns).permute(0, 3, 1, 2)


def _resize_rows(features: Tensor, height: int) -> Tensor:
    """(N, C, h, w) -> (N, C, H, w), channels last in memory."""
    n, c, h, w = features.shape
    rows = features.permute(0, 2, 3, 1).flatten(2)  # (N, h, w C)
    return (resizing_matrix(h, height, rows) @ rows).view(n, height, w, c).permute(0, 3, 1, 2)


def resizing_matrix(length: int, size: int, like: Tensor) -> Tensor:
    """Return the matrix of linear interpolation without aligned corners, (size, length), for products with `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    targets, sources = (torch.arange(number, dtype=dtype, device=like.device) for number in (size, length))
    positions = ((targets + 0.5) * (length / size) - 0.5).clamp(0, length - 1)
    weights = 1 - (positions[:, None] - sources).abs()
    return weights.clamp(min=0).to(like.dtype)


def pyramid_pooling(features: Tensor, scales: Sequence[int]) -> list[Tensor]:
    """Return averages over grids of s x s bins per image, (N, C, H, W) -> (N, C, s, s) per scale s.

    This is torch's adaptive average pooling, in one pass over the map for all scales. As matrix products, it has
    deterministic gradients on a GPU and can be exported for images of any size.
    """
    n, c, h, w = features.shape
    lines = features.permute(0, 2, 3, 1).flatten(2)  # (N, H, W C)
    rows, columns = ([_bins(length, scale, features) for scale in scales] for length in (h, w))
    sums = torch.cat([bins.inside for bins in rows]) @ lines  # (N, all bins, W C)
    pooled, end = [], 0
    for scale, row, column in zip(scales, rows, columns, strict=True):
        start, end = end, end + scale
        averages = (sums[:, start:end] / row.number).view(n, scale, w, c)
        pooled.append((column.inside @ averages / column.number).permute(0, 3, 1, 2))
    return pooled


class _Bins(NamedTuple):
    """Bins along one axis of a feature map, which may overlap."""

    inside: Tensor  # (bins, length), 1 for positions in the bin and 0 for others: exact in 16 bits
    number: Tensor  # (bins, 1), number of positions in the bin


def _bins(length: int, bins: int, like: Tensor) -> _Bins:
    """Return the bins of torch's adaptive average pooling, for products with `like`."""
    indices = torch.arange(bins, device=like.device)[:, None]
    first, end = indices * length // bins, ((indices + 1) * length + bins - 1) // bins  # the end is rounded up
    positions = torch.arange(length, device=like.device)
    return _Bins(((positions >= first) & (positions < end)).to(like.dtype), end - first)
