"""Layers for the export equal timm's."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from caaseg.models.export_layers import largest_window, replace_layers
from caaseg.models.timm_networks import SwinTransformerBlock, SwinTransformerV2Block, davit


def assert_unchanged(layer: nn.Module, *shape: int) -> None:
    """Compare a layer in float64 with its replacement."""
    layer = layer.double().eval()
    replaced = copy.deepcopy(layer)
    replace_layers(replaced)
    features = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(replaced(features), layer(features))


@pytest.mark.parametrize("kind", [SwinTransformerBlock, SwinTransformerV2Block])
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("size", [(8, 8), (9, 13), (3, 4)])
def test_blocks_of_swin_are_unchanged(kind: Any, shift: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    block = kind(8, (16, 16), num_heads=2, window_size=4, shift_size=shift, dynamic_mask=True)
    assert_unchanged(block, 2, *size, 8)


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (3, 4)])
def test_blocks_of_davit_are_unchanged(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_unchanged(davit.SpatialBlock(8, num_heads=2, window_size=4), 2, 8, *size)


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (3, 4), (1, 6)])
def test_the_strided_layers_of_davit_are_unchanged(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_unchanged(davit.Stem(3, 8), 2, 3, *size)
    assert_unchanged(davit.Downsample(8, 12, kernel_size=2), 2, 8, *size)
    assert_unchanged(davit.Downsample(8, 12, kernel_size=3), 2, 8, *size)


def test_the_largest_window_is_found() -> None:
    assert largest_window(nn.Conv2d(3, 4, 1)) == 1
    assert largest_window(nn.Sequential(davit.SpatialBlock(8, num_heads=2, window_size=4), davit.Stem(3, 8))) == 4
