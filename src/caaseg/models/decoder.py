"""The paper's "simple decoder" on stride-4 features (appendix; like DeepLabv3+), and a second step at stride 2."""

from torch import Tensor, cat, nn

from caaseg.attention.projection import projection
from caaseg.models.resize import resize

FINE_CHANNELS = 48
FINEST_CHANNELS = 24


class SimpleDecoder(nn.Module):
    """Upsample the head's features to stride 4 and refine them with the backbone's fine features.

    With the backbone's stride-2 features, a second step does the same at stride 2, with one 3x3 convolution. That step
    is not in the paper.

    Args:
        in_channels: channels of the head's features.
        fine_channels: channels of the backbone's stride-4 features.
        channels: output channels, 256 in the paper.
        finest_channels: channels of the backbone's stride-2 features; None ends at stride 4.
    """

    def __init__(
        self, in_channels: int, fine_channels: int, channels: int = 256, finest_channels: int | None = None
    ) -> None:
        super().__init__()
        self.fine = projection(fine_channels, FINE_CHANNELS)
        self.refine = nn.Sequential(
            projection(in_channels + FINE_CHANNELS, channels, kernel_size=3),
            projection(channels, channels, kernel_size=3),
        )
        self.out_channels = channels
        self.finest = None if finest_channels is None else projection(finest_channels, FINEST_CHANNELS)
        self.refine_finest = (
            None if finest_channels is None else projection(channels + FINEST_CHANNELS, channels, kernel_size=3)
        )

    def forward(self, features: Tensor, fine: Tensor, finest: Tensor | None = None) -> Tensor:
        """(N, in_channels, h, w) and (N, fine_channels, H/4, W/4) -> (N, channels, H/4, W/4).

        With `finest`, (N, finest_channels, H/2, W/2), the result is (N, channels, H/2, W/2).
        """
        upsampled = resize(features, fine.shape[2:])
        refined: Tensor = self.refine(cat([upsampled, self.fine(fine)], dim=1))
        if self.finest is None or self.refine_finest is None:
            return refined
        assert finest is not None
        upsampled = resize(refined, finest.shape[2:])
        finely_refined: Tensor = self.refine_finest(cat([upsampled, self.finest(finest)], dim=1))
        return finely_refined
