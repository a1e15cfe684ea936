"""The EMANet head: attention to a few bases, found by expectation maximization (Li et al., ICCV 2019).

Shapes: N batch, C channels, H rows, W columns, P pixels of an image, K bases.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.attention.axial import softmax_scores, without_autocast
from caaseg.attention.spatial import as_pixels, from_pixels
from caaseg.config import Architecture
from caaseg.models.heads.concat import ConcatHead
from caaseg.models.heads.pyramid import EPSILON


class ExpectationMaximizationAttention(nn.Module):
    """Features reconstructed from K bases, which adapt to each image, added to the features.

    The bases start from a buffer. In training, the buffer follows the mean of the bases over the images of all
    processes. As in the authors' code, no gradient flows through the reconstruction: the layers before this module
    learn through the shortcut. The module's own linear layer is therefore never trained: it keeps its random initial
    weights, so that its outputs have both signs.

    Args:
        channels: channels C of input and output.
        num_bases: number K of bases.
        iterations: iterations of expectation maximization.
        momentum: weight of the bases of a step in the moving average.
    """

    communicates = True  # in training, with the other processes
    bases: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int, *, num_bases: int = 64, iterations: int = 3, momentum: float = 0.1) -> None:
        super().__init__()
        if iterations < 1:
            raise ValueError(f"iterations is {iterations}; expected 1 or more")
        self.iterations = iterations
        self.momentum = momentum
        self.register_buffer("bases", F.normalize(torch.randn(num_bases, channels), dim=1))
        self.register_buffer("weight", nn.init.kaiming_normal_(torch.empty(channels, channels)))
        self.register_buffer("bias", torch.zeros(channels))
        self.exit = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels, eps=EPSILON))

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W), after ReLU."""
        pixels = F.linear(as_pixels(features.detach()), self.weight, self.bias)  # (N, P, C)
        rebuilt = from_pixels(self.reconstruct(pixels).relu(), *features.shape[2:])
        return F.relu(features + self.exit(rebuilt))

    def reconstruct(self, pixels: Tensor) -> Tensor:
        """Return each pixel as a weighted sum of the bases of its image, (N, P, C) -> (N, P, C); update the buffer.

        Computed in float32 or float64.
        """
        with without_autocast(pixels.device.type):
            wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
            bases = self.bases.to(wide.dtype).expand(pixels.shape[0], -1, -1)  # (N, K, C)
            for _ in range(self.iterations):
                weights = softmax_scores(wide, bases)  # (N, P, K)
                # Weighted means of pixels, scaled to length 1, so no division by the sums of the weights is needed.
                bases = F.normalize(weights.transpose(1, 2) @ wide, dim=2)
            if self.training:
                self._update(bases)
            return (weights @ bases).to(pixels.dtype)

    def _update(self, bases: Tensor) -> None:
        """Move the buffer towards the mean of bases (N, K, C) over the images of all processes."""
        total = bases.sum(0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        self.bases.lerp_(F.normalize(total, dim=1).to(self.bases.dtype), self.momentum)  # in place, for CUDA graphs


class EMANetHead(ConcatHead):
    """Expectation-maximization attention between two 3x3 convolutions.

    Args:
        in_channels: channels of the backbone's coarse feature map.
        config: architecture settings. As in mmsegmentation, the attention is wider (`config.channels`) than the last
            convolutions (`config.bottleneck_channels`).
        num_bases: number of bases.
        iterations: iterations of expectation maximization.
        momentum: weight of the bases of a step in their moving average.
    """

    title = "EMANet"
    without_attention = (
        "An EMANet head has no attention between pixels. Every pixel attends to a few bases, which are computed from "
        "the whole image."
    )

    def __init__(
        self,
        in_channels: int,
        config: Architecture,
        *,
        num_bases: int = 64,
        iterations: int = 3,
        momentum: float = 0.1,
    ) -> None:
        block = ExpectationMaximizationAttention(
            config.channels, num_bases=num_bases, iterations=iterations, momentum=momentum
        )
        super().__init__(in_channels, config, block, config.bottleneck_channels)
