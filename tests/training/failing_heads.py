"""Heads that fail in training, for the tests of the training loop."""

import math

import torch
from torch import Tensor

from caaseg.config import Architecture
from caaseg.models.heads.base import HeadFeatures
from caaseg.models.heads.fcn import FCNHead

NAN_STEP = 3


class NaNHead(FCNHead):
    """Returns NaN in the third training step."""

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__(in_channels, config)
        self.steps = 0

    def forward(self, features: Tensor) -> HeadFeatures:
        output = super().forward(features)
        self.steps += self.training
        return output._replace(fused=output.fused * math.nan) if self.steps == NAN_STEP else output


class TooLargeHead(FCNHead):
    """Needs more memory than the device has."""

    def forward(self, features: Tensor) -> HeadFeatures:
        raise torch.OutOfMemoryError("CUDA out of memory")
