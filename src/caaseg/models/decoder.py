"""The paper's "simple decoder" on stride-4 features (appendix; similar to DeepLabv3+)."""

from torch import Tensor, cat, nn

from caaseg.attention.projection import projection
from caaseg.models.resize import resize

FINE_CHANNELS = 48


class SimpleDecoder(nn.Module):
    """Upsample the head's features to stride 4 and refine them with the backbone's fine features.

    Args:
        in_channels: channels of the head's features.
        fine_channels: channels of the backbone's stride-4 features.
        channels: output channels, 256 in the paper.
    """

    def __init__(self, in_channels: int, fine_channels: int, channels: int = 256) -> None:
        super().__init__()
        self.fine = projection(fine_channels, FINE_CHANNELS)
        self.refine = nn.Sequential(
            projection(in_channels + FINE_CHANNELS, channels, kernel_size=3),
            projection(channels, channels, kernel_size=3),
        )
        self.out_channels = channels

    def forward(self, features: Tensor, fine: Tensor) -> Tensor:
        """(N, in_channels, h, w) and (N, fine_channels, H/4, W/4) -> (N, channels, H/4, W/4)."""
        upsampled = resize(features, fine.shape[2:])
        refined: Tensor = self.refine(cat([upsampled, self.fine(fine)], dim=1))
        return refined
