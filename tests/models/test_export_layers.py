"""Shifted-window attention for the export equals timm's."""

import pytest
import torch

from caaseg.models.shifted_windows import replace_window_attention
from caaseg.models.timm_networks import SwinTransformerBlock


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("size", [(8, 8), (9, 13), (3, 4)])
def test_the_attention_of_a_block_is_unchanged(shift: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    block = SwinTransformerBlock(8, (16, 16), num_heads=2, window_size=4, shift_size=shift, dynamic_mask=True)
    block.double().eval()
    features = torch.randn(2, *size, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = block(features)
        replace_window_attention(block)
        torch.testing.assert_close(block(features), expected)
