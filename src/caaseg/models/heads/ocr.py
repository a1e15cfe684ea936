"""The OCR head: attention to the regions of the classes (Yuan et al., Object-Contextual Representations, ECCV 2020).

Shapes: N batch, C channels, D key channels, H rows, W columns, P pixels of an image, K classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from caaseg.attention.axial import gather
from caaseg.attention.projection import projection
from caaseg.attention.spatial import as_pixels, attend, from_pixels
from caaseg.config import ModelConfig
from caaseg.models.heads.base import FusionHead, HeadFeatures
from caaseg.models.heads.pyramid import EPSILON, PyramidProjection
from caaseg.models.resize import resize


class OCRHead(FusionHead):
    """Every pixel attends to one region per class. Logits from the stage before the last define the regions.

    Training supervises these logits as the branch "regions"; mmsegmentation's weight for them is 0.4.

    Args:
        in_channels: channels of the last two stages.
        config: model settings.
        key_channels: channels D of queries, keys and values; None for half of `config.channels`.
    """

    title = "OCRNet"
    levels = (-2, -1)
    without_attention = (
        "An OCR head has no attention between pixels. Every pixel attends to one region per class, the average of the "
        "features of the pixels that seem to be of this class."
    )

    def __init__(self, in_channels: tuple[int, ...], config: ModelConfig, *, key_channels: int | None = None) -> None:
        super().__init__()
        low, high = in_channels
        channels = config.channels
        keys = max(channels // 2, 1) if key_channels is None else key_channels
        self.region_entry = projection(low, config.bottleneck_channels, kernel_size=3, eps=EPSILON)
        self.classifier = nn.Conv2d(config.bottleneck_channels, config.num_classes, 1)
        nn.init.xavier_uniform_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]
        self.entry = projection(high, channels, kernel_size=3, eps=EPSILON)
        self.queries, self.keys = (
            nn.Sequential(projection(channels, keys, eps=EPSILON), projection(keys, keys, eps=EPSILON))
            for _ in range(2)
        )
        self.values = projection(channels, keys, eps=EPSILON)
        self.exit = projection(keys, channels, eps=EPSILON)
        self.join = PyramidProjection(2 * channels, channels, kernel_size=1)
        self.build_end(channels, config)

    def forward(self, features: Sequence[Tensor]) -> HeadFeatures:
        low, high = features
        regions = self.classifier(self.dropout(self.region_entry(low)))  # (N, K, H, W)
        entered = self.entry(high)  # (N, C, H, W)
        resized = resize(regions, entered.shape[2:], align_corners=False)
        return self.end(self.attend(entered, resized))._replace(logits={"regions": regions})

    def attend(self, features: Tensor, regions: Tensor) -> Tensor:
        """Attend to the regions that logits define: (N, C, H, W) and (N, K, H, W) -> (N, C, H, W)."""
        wide = regions.to(torch.promote_types(regions.dtype, torch.float32))
        weights = wide.flatten(2).softmax(2)  # (N, K, P), over the pixels of an image
        averages = gather(weights, as_pixels(features))  # (N, K, C)
        as_map = averages.transpose(1, 2).unsqueeze(3)  # (N, C, K, 1)
        queries, keys, values = (
            as_pixels(layer(maps))
            for layer, maps in ((self.queries, features), (self.keys, as_map), (self.values, as_map))
        )
        attended = from_pixels(attend(queries, keys, values, scale=None), *features.shape[2:])  # (N, D, H, W)
        joined: Tensor = self.join([self.exit(attended), features])
        return joined
