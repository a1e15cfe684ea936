"""The simple decoder."""

import torch
from torch import Tensor

from caaseg.models.decoder import SimpleDecoder


def test_the_features_of_the_head_are_upsampled_bilinearly_with_aligned_corners() -> None:
    decoder = SimpleDecoder(1, 2, channels=4)
    inputs: list[Tensor] = []
    decoder.refine.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    rows, columns = torch.linspace(0, 1, 3)[:, None], torch.linspace(0, 1, 4)
    assert decoder((rows + 2 * columns)[None, None], torch.randn(1, 2, 9, 13)).shape == (1, 4, 9, 13)
    expected = torch.linspace(0, 1, 9)[:, None] + 2 * torch.linspace(0, 1, 13)  # a plane stays a plane
    torch.testing.assert_close(inputs[0][0, 0], expected)
