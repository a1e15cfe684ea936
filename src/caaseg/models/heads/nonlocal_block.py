"""The non-local head: scaled self-attention between two 3x3 convolutions (Wang et al., CVPR 2018).

The settings are those of mmsegmentation: embedded Gaussian, and keys with half of the channels.
"""

from torch import Tensor, nn

from caaseg.attention.spatial import as_pixels, attend, from_pixels
from caaseg.config import Architecture
from caaseg.models.heads.concat import ConcatHead
from caaseg.models.heads.pyramid import EPSILON

INITIAL_STD = 0.01


class NonLocalBlock(nn.Module):
    """Attention of every pixel to all pixels, with the dot products divided by the square root of their channels.

    The scale of the last batch normalization starts at 0, so that the block starts as the identity.

    Args:
        channels: channels of input and output.
        reduction: queries, keys and values have channels / reduction channels.
    """

    def __init__(self, channels: int, *, reduction: int = 2) -> None:
        super().__init__()
        inner = max(channels // reduction, 1)
        self.queries, self.keys, self.values = (nn.Conv2d(channels, inner, 1) for _ in range(3))
        for convolution in (self.queries, self.keys, self.values):
            nn.init.normal_(convolution.weight, std=INITIAL_STD)
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        norm = nn.BatchNorm2d(channels, eps=EPSILON)
        nn.init.zeros_(norm.weight)
        self.exit = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), norm)

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        queries, keys, values = (as_pixels(layer(features)) for layer in (self.queries, self.keys, self.values))
        attended = from_pixels(attend(queries, keys, values, scale=None), *features.shape[2:])  # (N, C/2, H, W)
        result: Tensor = features + self.exit(attended)
        return result


class NonLocalHead(ConcatHead):
    """A non-local block between two 3x3 convolutions."""

    title = "non-local network"
    without_attention = (
        "A non-local head has no attention along columns and rows. Every pixel attends to all pixels at once."
    )

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__(in_channels, config, NonLocalBlock(config.channels))
