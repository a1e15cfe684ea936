"""Dilation rates of the blocks whose strides were removed to reach a smaller output stride."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def spatial_convolutions(block: nn.Module) -> list[nn.Conv2d]:
    """Return the convolutions of a block with kernels larger than 1 x 1."""
    return [conv for conv in block.modules() if isinstance(conv, nn.Conv2d) and conv.kernel_size != (1, 1)]


def dilate(convolution: nn.Conv2d, rate: int) -> None:
    """Set the dilation of a convolution of stride 1, with the padding that keeps the size."""
    side = convolution.kernel_size[0]
    convolution.dilation, convolution.padding = (rate, rate), (rate * (side - 1) // 2,) * 2


def residual_blocks(net: Any) -> list[nn.Module]:
    """Return the blocks of timm's ResNets and EfficientNets in order; an empty list for other networks."""
    layers = [getattr(net, f"layer{number}", ()) for number in range(1, 5)]
    stages = layers if hasattr(net, "layer1") else getattr(net, "blocks", ())
    return [block for stage in stages for block in stage]


def dilate_from_removed_strides(blocks: Sequence[nn.Module], originals: Sequence[nn.Module]) -> None:
    """Set the dilation rates of the authors' code: the new rate starts at the block whose stride was removed.

    timm gives this block the previous rate, and the new rate to the blocks after it.

    Args:
        blocks: blocks of the dilated network.
        originals: the same blocks of the network with all its strides.
    """
    rate = 1
    for block, original in zip(blocks, originals, strict=True):
        rate *= _stride(original) // _stride(block)
        if rate > 1:
            for convolution in spatial_convolutions(block):
                dilate(convolution, rate)


def _stride(block: nn.Module) -> int:
    return max((convolution.stride[0] for convolution in spatial_convolutions(block)), default=1)
