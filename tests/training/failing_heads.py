"""Heads that fail in training, for the tests of the training loop."""

import math
import os
import signal

import torch
from torch import Tensor, nn

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


class SecondRankHead(FCNHead):
    """Fails in the second training step of the second rank. With several ranks, it also runs before the first step."""

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__(in_channels, config)
        self.steps = -1

    def forward(self, features: Tensor) -> HeadFeatures:
        output = super().forward(features)
        self.steps += self.training
        return self.fail(output) if self.steps == 2 and os.environ["RANK"] == "1" else output

    def fail(self, output: HeadFeatures) -> HeadFeatures:
        raise NotImplementedError


class KilledHead(SecondRankHead):
    """Kills the process."""

    def fail(self, output: HeadFeatures) -> HeadFeatures:
        os.kill(os.getpid(), signal.SIGKILL)
        return output


class StoppedHead(SecondRankHead):
    """Stops the process, which then does not answer."""

    def fail(self, output: HeadFeatures) -> HeadFeatures:
        os.kill(os.getpid(), signal.SIGSTOP)
        return output


class SecondRankNaNHead(SecondRankHead):
    """Returns NaN."""

    def fail(self, output: HeadFeatures) -> HeadFeatures:
        return output._replace(fused=output.fused * math.nan)


class UnusedLayerHead(FCNHead):
    """Has a layer that does not influence its output."""

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__(in_channels, config)
        self.unused = nn.Linear(3, 3)
