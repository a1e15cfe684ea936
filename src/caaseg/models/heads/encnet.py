"""The EncNet head: channels weighted by an encoding of the whole image (Zhang et al., CVPR 2018).

Shapes: N batch, C channels, H rows, W columns, P pixels of an image, K codewords.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from caaseg.attention.axial import without_autocast
from caaseg.attention.projection import projection
from caaseg.attention.spatial import as_pixels
from caaseg.config import Architecture, ModelConfig
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection
from caaseg.models.resize import resize


class Encoding(nn.Module):
    """Differences between pixels and K learned codewords, summed over the pixels that are assigned to a codeword.

    The assignment of pixel x to codeword c is the softmax over c of scale[c] * |x - c|^2. With |x - c|^2 = |x|^2 - 2 x
    c + |c|^2, no tensor of P x K x C is built.

    Args:
        channels: channels C of the features.
        num_codes: number K of codewords.
    """

    def __init__(self, channels: int, num_codes: int) -> None:
        super().__init__()
        bound = (num_codes * channels) ** -0.5
        self.codewords = nn.Parameter(torch.empty(num_codes, channels).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.empty(num_codes).uniform_(-1, 0))

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, K, C), computed in float32 or float64."""
        with without_autocast(features.device.type):
            pixels = as_pixels(features.to(torch.promote_types(features.dtype, torch.float32)))  # (N, P, C)
            codewords, scale = self.codewords.to(pixels.dtype), self.scale.to(pixels.dtype)
            products = pixels @ codewords.T  # (N, P, K)
            distances = pixels.square().sum(2, keepdim=True) - 2 * products + codewords.square().sum(1)
            weights = (scale * distances).softmax(2)  # (N, P, K)
            encoded = weights.transpose(1, 2) @ pixels - weights.sum(1).unsqueeze(2) * codewords
            return encoded.to(self.codewords.dtype)


class EncNetHead(FusionHead):
    """Channels weighted by an encoding of the image, which also predicts the classes that the image contains.

    Args:
        in_channels: channels of the last three stages; without `config.lateral`, only the last is used.
        config: model settings.
        num_codes: number of codewords.
    """

    title = "EncNet"
    levels = (-3, -2, -1)
    without_attention = (
        "An EncNet head has no attention between pixels. It weights the channels of all pixels by an encoding of the "
        "whole image."
    )

    def __init__(self, in_channels: tuple[int, ...], config: ModelConfig, *, num_codes: int = 32) -> None:
        super().__init__()
        channels = config.channels
        self.entry = projection(in_channels[-1], channels, kernel_size=3, eps=EPSILON)
        lateral = in_channels[:-1] if config.lateral else ()
        self.lateral = nn.ModuleList(projection(width, channels, eps=EPSILON) for width in lateral)
        self.join = PyramidProjection(3 * channels, channels, kernel_size=3) if config.lateral else None
        self.pixels = projection(channels, channels, eps=EPSILON)
        self.encoding = nn.Sequential(Encoding(channels, num_codes), nn.BatchNorm1d(num_codes, eps=EPSILON), nn.ReLU())
        self.gate = nn.Linear(channels, channels)
        self.classifier = nn.Linear(channels, config.num_classes)
        self.build_end(channels, config)

    @classmethod
    def read_levels(cls, config: Architecture) -> tuple[int, ...]:
        return cls.levels if config.lateral else cls.levels[-1:]

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        entered = self.entry(features[-1])  # (N, C, H, W)
        if self.join is not None:
            others = [layer(level) for layer, level in zip(self.lateral, features[:-1], strict=True)]
            resized = [resize(other, entered.shape[2:], align_corners=False) for other in others]
            entered = self.join([entered, *resized])
        encoded = self.encoding(self.pixels(entered)).mean(1)  # (N, C)
        gate = self.gate(encoded).sigmoid()
        weighted = entered * (1 + gate)[:, :, None, None].to(entered.dtype)
        return self.end(weighted)._replace(presence=self.classifier(encoded))
