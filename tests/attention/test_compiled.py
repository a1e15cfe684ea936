"""Blocks under torch.compile, in full: the numbers stay what they were, for a batch of one image too."""

import shutil

import pytest
import torch
from torch import nn

from caaseg.attention import ChannelizedAxialAttention, PositionAttention, SelfAttention

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++, by which torch.compile makes code for a CPU"
)

CAA = ChannelizedAxialAttention(12, key_channels=4, value_channels=12, gate_layers=1, gate_width=8)
AXIAL = ChannelizedAxialAttention(12, key_channels=4, value_channels=12, channelize=False)
FULL = SelfAttention(12, key_channels=4, value_channels=12, channelize=False, gate_layers=1, gate_width=8)
POSITION = PositionAttention(12)


@pytest.mark.parametrize(
    ("block", "size"),
    [(CAA, (3, 4)), (CAA, (8, 8)), (AXIAL, (8, 8)), (FULL, (3, 4)), (POSITION, (3, 4))],
    ids=["caa-3x4", "caa-8x8", "axial-8x8", "self_attention-3x4", "position-3x4"],
)
def test_compiled_blocks_give_the_same_numbers_and_gradients(block: nn.Module, size: tuple[int, int]) -> None:
    block = block.double().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    features = torch.randn(1, 12, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    features.requires_grad_()
    cotangent = torch.randn_like(features)
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    for run in (torch.no_grad, torch.enable_grad):  # for inference other rules apply
        with run():
            torch.testing.assert_close(compiled(features), block(features))
    found, expected = (torch.autograd.grad(forward(features), features, cotangent) for forward in (compiled, block))
    torch.testing.assert_close(found, expected)
