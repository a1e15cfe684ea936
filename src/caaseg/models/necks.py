"""Necks: modules between the backbone and the head, for backbones that are not dilated."""

from collections.abc import Collection, Sequence

from torch import Tensor, cat, nn

from caaseg.attention.projection import BN_EPSILON, projection
from caaseg.config import ModelConfig
from caaseg.errors import CaasegError
from caaseg.models.backbones import Backbone, Features, TimmBackbone
from caaseg.models.heads.base import Head
from caaseg.models.resize import cells, resize
from caaseg.models.timm_networks import FINE_STRIDE, PYRAMID_STRIDES, LayerNorm2d

RATES = (1, 2, 4, 8)
SFP_STRIDES = (4, 8, 16, 32)


class Neck(nn.Module):
    """Base class of necks: `forward(features, size) -> Features`, where size is the height and width of the images."""

    coarse_channels: int
    fine_channels: int | None
    """Channels of `Features.fine`; None if that is None."""
    level_channels: tuple[int, ...]
    """Channels of `Features.levels`."""


def make_neck(config: ModelConfig, backbone: Backbone, head: type[Head]) -> Neck | None:
    """Return the neck of a model, or None. Raise an error if it does not fit the backbone or the head."""
    name = config.neck
    if name is None:
        return None
    if not isinstance(backbone, TimmBackbone):
        raise CaasegError(f"neck is {name}, for timm backbones only; leave it out")
    strides, applicable = list(backbone.level_strides), backbone.layout.necks
    if name not in applicable:
        needed = f"strides {', '.join(map(str, PYRAMID_STRIDES))}" if name == "jpu" else "a plain ViT"
        raise CaasegError(
            f"backbone {backbone.name} has features of strides {strides}; neck {name} needs {needed}: use neck "
            f"{' or '.join(applicable)}, or another backbone"
        )
    if name == "sfp":
        return SimpleFeaturePyramid(
            backbone.coarse_channels, strides[-1], config.channels, config.output_stride, _read_strides(config, head)
        )
    if head.levels is not None:
        hint = "no neck, or neck sfp" if backbone.layout.blocks else "no neck and output stride 32"
        raise CaasegError(f"{head.title} reads several feature maps, but neck {name} gives one; use {hint}")
    if name == "jpu":
        return JPU(backbone.level_channels, strides, config.channels, backbone.fine_channels)
    return Resize(backbone.level_channels, config.output_stride, config.channels, backbone.fine_channels)


def _read_strides(config: ModelConfig, head: type[Head]) -> set[int]:
    """Return the strides of the feature maps that a model reads. The weights of other maps would get no gradients."""
    level_strides = _level_strides(config.output_stride)
    strides = {level_strides[index] for index in head.read_levels(config) or ()}
    if head.levels is None or (config.aux and config.aux_stage is None):
        strides.add(config.output_stride)
    if config.aux and config.aux_stage is not None:
        strides.add(level_strides[config.aux_stage - 1])
    return strides | {FINE_STRIDE} if config.decoder else strides


def _level_strides(output_stride: int) -> list[int]:
    """Return the strides of the levels of a `SimpleFeaturePyramid`: at most the output stride, as with dilation."""
    return [min(stride, output_stride) for stride in SFP_STRIDES]


class Resize(Neck):
    """Project all feature maps to one width, resize them to the output stride and join them (Xie et al., SegFormer).

    Args:
        in_channels: channels of the feature maps.
        output_stride: stride of the result.
        width: channels of each projection and of the result.
        fine_channels: channels of the stride-4 features, which are passed on; None without them.
    """

    def __init__(self, in_channels: Sequence[int], output_stride: int, width: int, fine_channels: int | None) -> None:
        super().__init__()
        self.output_stride = output_stride
        self.projections = nn.ModuleList(projection(channels, width) for channels in in_channels)
        self.join = projection(len(in_channels) * width, width)
        self.coarse_channels, self.fine_channels, self.level_channels = width, fine_channels, tuple(in_channels)

    def forward(self, features: Features, size: Sequence[int]) -> Features:
        target = [cells(side, self.output_stride) for side in size]
        pairs = zip(self.projections, features.levels, strict=True)
        projected = [resize(project(level), target) for project, level in pairs]  # (N, width, H/stride, W/stride)
        return features._replace(coarse=self.join(cat(projected, dim=1)))


class JPU(Neck):
    """Joint pyramid upsampling (Wu et al., FastFCN): features of strides 8, 16 and 32 become one map of stride 8.

    It replaces dilation, for backbones that are pretrained at stride 32, such as ConvNeXt.

    Args:
        in_channels: channels of the feature maps.
        in_strides: strides of the feature maps, which include 8, 16 and 32.
        width: channels of each of the four branches; the output has four times as many.
        fine_channels: channels of the stride-4 features, which are passed on; None without them.
    """

    def __init__(
        self, in_channels: Sequence[int], in_strides: Sequence[int], width: int, fine_channels: int | None
    ) -> None:
        super().__init__()
        self.levels = [in_strides.index(stride) for stride in PYRAMID_STRIDES]
        self.entries = nn.ModuleList(projection(in_channels[level], width, kernel_size=3) for level in self.levels)
        self.branches = nn.ModuleList(_separable(len(self.levels) * width, width, rate) for rate in RATES)
        self.coarse_channels, self.fine_channels = len(RATES) * width, fine_channels
        self.level_channels = tuple(in_channels)

    def forward(self, features: Features, size: Sequence[int]) -> Features:
        maps = [features.levels[level] for level in self.levels]
        target = maps[0].shape[2:]
        entered = [resize(entry(one), target) for entry, one in zip(self.entries, maps, strict=True)]
        joined = cat(entered, dim=1)  # (N, 3 width, H/8, W/8)
        return features._replace(coarse=cat([branch(joined) for branch in self.branches], dim=1))


def _separable(in_channels: int, out_channels: int, rate: int) -> nn.Sequential:
    """Return a depthwise 3x3 convolution with bias, batch normalization, and a 1x1 projection."""
    depthwise = nn.Conv2d(in_channels, in_channels, 3, padding=rate, dilation=rate, groups=in_channels)
    nn.init.xavier_uniform_(depthwise.weight)
    nn.init.zeros_(depthwise.bias)  # type: ignore[arg-type]
    norm = nn.BatchNorm2d(in_channels, eps=BN_EPSILON)
    return nn.Sequential(depthwise, norm, projection(in_channels, out_channels))


class SimpleFeaturePyramid(Neck):
    """Feature maps of strides 4, 8, 16 and 32 from the last map of a plain ViT (Li et al., ViTDet).

    As with a dilated backbone, no map is coarser than the output stride: with output stride 8, the levels have the
    strides 4, 8, 8 and 8.

    The map is enlarged by transposed convolutions, or reduced by max pooling; each result has a 1x1 and a 3x3
    convolution with layer normalization. A ViT of stride 14 is treated as one of stride 16, and its maps are resized.

    Args:
        in_channels: channels of the ViT's feature map.
        in_stride: stride of that map.
        width: channels of the results.
        output_stride: stride of the coarse features.
        read_strides: strides of the maps to build. `levels` has the ViT's own map in the positions of other strides.
    """

    def __init__(
        self, in_channels: int, in_stride: int, width: int, output_stride: int, read_strides: Collection[int]
    ) -> None:
        super().__init__()
        self.in_stride, self.output_stride = in_stride, output_stride
        self.nominal = min(SFP_STRIDES, key=lambda stride: abs(stride - in_stride))
        read = [stride for stride in SFP_STRIDES if stride in read_strides]
        self.maps = nn.ModuleDict({str(stride): _scaled(in_channels, self.nominal / stride, width) for stride in read})
        self.coarse_channels = width
        self.fine_channels = width if FINE_STRIDE in read_strides else None
        self.level_channels = (width,) * len(SFP_STRIDES)

    def forward(self, features: Features, size: Sequence[int]) -> Features:
        last = features.levels[-1]
        found = {int(name): self._fit(scale(last), int(name), size) for name, scale in self.maps.items()}
        return Features(
            found.get(self.output_stride, last),
            found.get(FINE_STRIDE),
            tuple(found.get(stride, last) for stride in _level_strides(self.output_stride)),
        )

    def _fit(self, scaled: Tensor, stride: int, size: Sequence[int]) -> Tensor:
        """Crop the map of a padded image, and resize it if needed, to ceil(H / stride) x ceil(W / stride)."""
        height, width = (cells(side * self.nominal, self.in_stride * stride) for side in size)  # without the padding
        cropped = scaled[:, :, :height, :width]
        if self.nominal == self.in_stride:
            return cropped
        return resize(cropped, [cells(side, stride) for side in size])


def _scaled(in_channels: int, factor: float, width: int) -> nn.Sequential:
    """Return layers that multiply height and width by a power of two and project to a width."""
    layers: list[nn.Module] = []
    channels = in_channels
    while factor > 1:
        if layers:
            layers += [LayerNorm2d(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, max(1, channels // 2), 2, stride=2))
        channels, factor = max(1, channels // 2), factor / 2
    if factor < 1:
        layers.append(nn.MaxPool2d(round(1 / factor), ceil_mode=True))
    for kernel_size in (1, 3):
        convolution = nn.Conv2d(channels, width, kernel_size, padding=kernel_size // 2, bias=False)
        nn.init.xavier_uniform_(convolution.weight)
        layers += [convolution, LayerNorm2d(width)]
        channels = width
    return nn.Sequential(*layers)
