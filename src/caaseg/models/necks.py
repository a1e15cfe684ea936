"""Necks: modules between the backbone and the head."""

from collections.abc import Sequence

from torch import Tensor, cat, nn

from caaseg.attention.projection import BN_EPSILON, projection
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone
from caaseg.models.resize import resize

RATES = (1, 2, 4, 8)
STRIDES = (8, 16, 32)
"""Strides of the feature maps that the neck joins."""


def joined_levels(backbone: TimmBackbone) -> list[int]:
    """Return the indices of the backbone's levels with these strides."""
    missing = [stride for stride in STRIDES if stride not in backbone.level_strides]
    if missing:
        raise CaasegError(
            f"backbone {backbone.name} has features of strides {list(backbone.level_strides)}; the neck needs stride "
            f"{missing[0]}: use another backbone, or no neck"
        )
    return [backbone.level_strides.index(stride) for stride in STRIDES]


class JPU(nn.Module):
    """Joint pyramid upsampling (Wu et al., FastFCN): features of strides 8, 16 and 32 become one map of stride 8.

    It replaces dilation, for backbones that are pretrained at stride 32, such as ConvNeXt.

    Args:
        in_channels: channels of the three feature maps.
        width: channels of each of the four branches; the output has four times as many.
    """

    def __init__(self, in_channels: Sequence[int], width: int) -> None:
        super().__init__()
        self.entries = nn.ModuleList(projection(channels, width, kernel_size=3) for channels in in_channels)
        self.branches = nn.ModuleList(_separable(len(in_channels) * width, width, rate) for rate in RATES)
        self.out_channels = len(RATES) * width

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """(N, C, H/8, W/8), (N, C', H/16, W/16) and (N, C'', H/32, W/32) -> (N, out_channels, H/8, W/8)."""
        size = features[0].shape[2:]
        entered = [resize(entry(level), size) for entry, level in zip(self.entries, features, strict=True)]
        joined = cat(entered, dim=1)  # (N, 3 width, H/8, W/8)
        return cat([branch(joined) for branch in self.branches], dim=1)


def _separable(in_channels: int, out_channels: int, rate: int) -> nn.Sequential:
    """Return a depthwise 3x3 convolution with bias, batch normalization, and a 1x1 projection."""
    depthwise = nn.Conv2d(in_channels, in_channels, 3, padding=rate, dilation=rate, groups=in_channels)
    nn.init.xavier_uniform_(depthwise.weight)
    nn.init.zeros_(depthwise.bias)  # type: ignore[arg-type]
    norm = nn.BatchNorm2d(in_channels, eps=BN_EPSILON)
    return nn.Sequential(depthwise, norm, projection(in_channels, out_channels))
