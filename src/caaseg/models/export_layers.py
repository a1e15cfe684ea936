"""Layers of Swin, Swin V2 and DaViT with shapes that torch.export can follow.

timm's own layers give the same numbers, but their shapes are long expressions of the image size: torch infers the
number of windows, and padding is computed with remainders. torch.export then needs many minutes for a few blocks.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.models.resize import cells
from caaseg.models.timm_networks import SwinTransformerBlock, SwinTransformerV2Block, davit

MASKED = -100.0
"""Added to the attention logits of positions that are not neighbors in the image, like timm."""


def replace_layers(model: nn.Module) -> None:
    """Replace the layers of a model in place."""
    replacements: dict[type[nn.Module], tuple[str, Callable[..., Tensor]]] = {
        SwinTransformerBlock: ("_attn", _attend_in_shifted_windows),
        SwinTransformerV2Block: ("_attn", _attend_in_shifted_windows),
        davit.SpatialBlock: ("forward", _davit_block),
        davit.Stem: ("forward", _davit_stem),
        davit.Downsample: ("forward", _davit_downsample),
    }
    for module in model.modules():
        if type(module) in replacements:
            name, function = replacements[type(module)]
            setattr(module, name, MethodType(function, module))


def largest_window(model: nn.Module) -> int:
    """Return the largest side of the attention windows of a model; 1 if it has none."""
    blocks = (SwinTransformerBlock, SwinTransformerV2Block, davit.SpatialBlock)
    sides = (side for module in model.modules() if isinstance(module, blocks) for side in module.window_size)
    return max(sides, default=1)


def _attend_in_shifted_windows(block: Any, features: Tensor) -> Tensor:
    """Attend within the windows of a Swin block, which are shifted in every second block: (N, H, W, C) -> the same."""
    n, height, width, _ = features.shape
    down, right = block.shift_size
    mask = None
    if down or right:
        rows, columns = (cells(side, window) for side, window in zip((height, width), block.window_size, strict=True))
        own = _mask(rows, columns, block, features)  # (rows, columns, L, L)
        mask = own.expand(n, *own.shape).reshape(n * rows * columns, *own.shape[2:])
    shifted = torch.roll(features, (-down, -right), (1, 2))
    attended = _attend_in_windows(shifted, block.window_size, lambda windows: block.attn(windows, mask=mask))
    return torch.roll(attended, (down, right), (1, 2))


def _mask(rows: int, columns: int, block: Any, features: Tensor) -> Tensor:
    """Return the attention mask per window, for pixels that are neighbors only because the shift wraps around."""
    regions = []
    for number, window, shift in zip((rows, columns), block.window_size, block.shift_size, strict=True):
        length = number * window
        position = torch.arange(length, device=features.device)
        region = (position >= length - window).long() + (position >= length - shift).long()
        regions.append(region.reshape(number, window))
    above, beside = regions
    ids = 3 * above[:, None, :, None] + beside[None, :, None, :]  # (rows, columns, window height, window width)
    flat = ids.reshape(rows, columns, block.window_area)
    other = flat[..., None] != flat[..., None, :]  # (rows, columns, L, L)
    return torch.where(other, MASKED, 0.0).to(features.dtype)


def _attend_in_windows(features: Tensor, window: tuple[int, int], attention: Callable[[Tensor], Tensor]) -> Tensor:
    """Divide features into windows, attend within each, and join them: (N, H, W, C) -> (N, H, W, C).

    Args:
        features: the map, which is padded with zeros to full windows.
        window: height and width of the windows.
        attention: maps all windows, (windows, L, C) -> (windows, L, C).
    """
    n, height, width, c = features.shape
    rows, columns = cells(height, window[0]), cells(width, window[1])
    padded = F.pad(features, (0, 0, 0, columns * window[1] - width, 0, rows * window[0] - height))
    split = padded.reshape(n, rows, window[0], columns, window[1], c).transpose(2, 3)
    windows = split.reshape(n * rows * columns, window[0] * window[1], c)
    attended = attention(windows).reshape(n, rows, columns, *window, c)
    joined = attended.transpose(2, 3).reshape(n, rows * window[0], columns * window[1], c)
    return joined[:, :height, :width]


def _davit_block(block: Any, features: Tensor) -> Tensor:
    """Run a DaViT block with window attention: (N, C, H, W) -> (N, C, H, W)."""
    features = block.cpe1(features)
    attended = _attend_in_windows(block.norm1(features.permute(0, 2, 3, 1)), block.window_size, block.attn)
    features = block.cpe2(features + block.drop_path1(attended.permute(0, 3, 1, 2)))
    mixed = block.mlp(block.norm2(features.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return features + block.drop_path2(mixed)  # type: ignore[no-any-return]


def _davit_stem(stem: Any, images: Tensor) -> Tensor:
    """Apply the first convolution with stride s, padded at the bottom and right: (N, 3, H, W) -> (N, C, H/s, W/s)."""
    padding = stem.conv.padding[0]
    # Only as much padding as the windows of the convolution reach: the size of the result is then a short expression.
    below, beside = (
        cells(side, stride) * stride - side + size - stride - padding
        for side, stride, size in zip(images.shape[2:], stem.stride, stem.conv.kernel_size, strict=True)
    )
    padded = F.pad(images, (padding, beside, padding, below))
    return stem.norm(F.conv2d(padded, stem.conv.weight, stem.conv.bias, stem.stride))  # type: ignore[no-any-return]


def _davit_downsample(layer: Any, features: Tensor) -> Tensor:
    """Halve height and width, rounded up: (N, C, H, W) -> (N, C', H/2, W/2)."""
    features = layer.norm(features)
    if layer.even_k:
        height, width = (cells(side, k) * k for side, k in zip(features.shape[2:], layer.conv.kernel_size, strict=True))
        features = F.pad(features, (0, width - features.shape[3], 0, height - features.shape[2]))
    return layer.conv(features)  # type: ignore[no-any-return]
