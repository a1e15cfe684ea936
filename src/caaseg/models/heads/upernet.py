"""The UPerNet head (Xiao et al., Unified Perceptual Parsing for Scene Understanding, ECCV 2018)."""

from collections.abc import Sequence

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.psp import PyramidPooling
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection
from caaseg.models.resize import resize


class UPerNetHead(FusionHead):
    """Feature pyramid of all backbone stages, with pyramid pooling of the last stage."""

    title = "UPerNet"
    levels = (0, 1, 2, 3)
    needs_two_images = True
    without_attention = (
        "A UPerNet head has no attention. It classifies a pixel from the features of all backbone stages around it "
        "and from averages over parts of the image."
    )

    def __init__(self, in_channels: Sequence[int], config: Architecture) -> None:
        super().__init__()
        *finer, last = in_channels
        channels = config.channels
        self.pooling = PyramidPooling(last, channels)
        self.laterals = nn.ModuleList(projection(level, channels, eps=EPSILON) for level in finer)
        self.outputs = nn.ModuleList(projection(channels, channels, kernel_size=3, eps=EPSILON) for _ in finer)
        self.bottleneck = PyramidProjection(len(in_channels) * channels, channels, kernel_size=3)
        self.build_end(channels, config)

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        *finer, last = features  # (N, C, h, w) each, from fine to coarse
        maps = [lateral(level) for lateral, level in zip(self.laterals, finer, strict=True)]
        maps.append(self.pooling(last))
        for index in reversed(range(len(finer))):  # each map gets the sum of the coarser maps
            maps[index] = maps[index] + resize(maps[index + 1], maps[index].shape[2:], align_corners=False)
        finest, *others = [output(level) for output, level in zip(self.outputs, maps[:-1], strict=True)]
        return self.end(self.bottleneck([finest], [*others, maps[-1]]))  # (N, channels, H, W)
