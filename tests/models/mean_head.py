"""A file with a user-defined head."""

from torch import nn

from caaseg.config import Architecture
from caaseg.models.heads.base import AttentionHead


class MeanHead(AttentionHead):
    def build_block(self, config: Architecture) -> nn.Module:
        return nn.Conv2d(config.channels, config.channels, 1)


not_a_head = 3
