"""Shifted-window attention of Swin with shapes that torch.export can follow (Liu et al., Swin Transformer).

timm's own code gives the same numbers, but lets torch infer the number of windows. torch.export then needs more than
five minutes to simplify the sizes of a few blocks.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.errors import CaasegError
from caaseg.models.resize import cells
from caaseg.models.timm_networks import SwinTransformerBlock, SwinTransformerV2Block

MASKED = -100.0
"""Added to the attention logits of positions that are not neighbors in the image, like timm."""


def replace_window_attention(model: nn.Module) -> None:
    """Replace the window attention of all Swin blocks of a model, in place. Raises CaasegError for Swin V2."""
    for module in model.modules():
        if isinstance(module, SwinTransformerV2Block):
            raise CaasegError(
                "the backbone is a Swin Transformer V2, which cannot be exported: its ONNX file fails at image sizes "
                "other than that of the export; use Swin or another backbone"
            )
        if isinstance(module, SwinTransformerBlock):
            module._attn = MethodType(_attend, module)  # type: ignore[method-assign]


def _attend(block: Any, features: Tensor) -> Tensor:
    """Attend within windows: (N, H, W, C) -> (N, H, W, C)."""
    n, height, width, c = features.shape
    (window_height, window_width), (down, right) = block.window_size, block.shift_size
    rows, columns = cells(height, window_height), cells(width, window_width)
    below, beside = rows * window_height - height, columns * window_width - width
    shifted = F.pad(torch.roll(features, (-down, -right), (1, 2)), (0, 0, 0, beside, 0, below))
    split = shifted.reshape(n, rows, window_height, columns, window_width, c).transpose(2, 3)
    windows = split.reshape(n * rows * columns, window_height * window_width, c)
    mask = None
    if down or right:
        own = _mask(rows, columns, block, features)  # (rows, columns, L, L)
        mask = own.expand(n, *own.shape).reshape(n * rows * columns, *own.shape[2:])
    attended = block.attn(windows, mask=mask).reshape(n, rows, columns, window_height, window_width, c)
    joined = attended.transpose(2, 3).reshape(n, rows * window_height, columns * window_width, c)
    return torch.roll(joined[:, :height, :width], (down, right), (1, 2))


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
