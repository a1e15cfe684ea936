"""Backbones: timm networks without their classifier, or modules of your own.

An output stride of 8 or 16 is reached by dilating the later stages instead of striding (Chen et al., DeepLab).
"""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from caaseg.config import Dilation, OutputStride, ResNetVariant
from caaseg.torchvision_compat import declare_missing_operators

declare_missing_operators()  # timm imports torchvision: import its classes from this module

import timm  # noqa: E402
from timm.models import FeatureDictNet as FeatureDictNet  # noqa: E402
from timm.models.efficientnet import EfficientNetFeatures  # noqa: E402
from timm.models.mobilenetv3 import MobileNetV3Features  # noqa: E402
from timm.models.resnet import BasicBlock as BasicBlock  # noqa: E402
from timm.models.resnet import Bottleneck as Bottleneck  # noqa: E402

from caaseg.errors import CaasegError  # noqa: E402
from caaseg.models import resnet_authors  # noqa: E402
from caaseg.models.dilation import (  # noqa: E402
    dilate,
    dilate_from_removed_strides,
    residual_blocks,
    spatial_convolutions,
)

FINE_STRIDE = 4  # of the feature map that the simple decoder reads, and of the first stage


class Features(NamedTuple):
    """Output of a backbone."""

    coarse: Tensor  # (N, coarse_channels, H/stride, W/stride), for the head
    fine: Tensor | None  # (N, fine_channels, H/4, W/4), for the decoder; None without a decoder
    levels: tuple[Tensor, ...] = ()  # (N, C, h, w) per stage, from fine to coarse, for necks and heads with `levels`


class Backbone(nn.Module):
    """Protocol of backbones: `create_model` accepts modules with these attributes and `forward(images) -> Features`."""

    coarse_channels: int
    fine_channels: int | None
    """Channels of `Features.fine`; None if that is None."""
    level_channels: tuple[int, ...] = ()
    """Channels of `Features.levels`."""
    mean: tuple[float, ...]
    """RGB mean that images are normalized with, for values from 0 to 1."""
    std: tuple[float, ...]
    """RGB standard deviation that images are normalized with."""


def check_backbone(module: nn.Module, *, with_fine: bool) -> Backbone:
    """Return the module as a backbone, or raise an error that names the missing attributes."""
    missing = [name for name in ("coarse_channels", "fine_channels", "mean", "std") if not hasattr(module, name)]
    if missing:
        raise CaasegError(
            f"backbone {type(module).__name__} has no attribute {', '.join(missing)}; expected a module like "
            "caaseg.models.backbones.Backbone, which returns Features(coarse, fine)"
        )
    backbone = cast("Backbone", module)
    if with_fine and backbone.fine_channels is None:
        raise CaasegError(
            f"backbone {type(module).__name__} has no fine features (fine_channels is None); the decoder needs them: "
            "use decoder=False"
        )
    return backbone


class FeatureInput(Backbone):
    """No backbone: the model takes feature maps instead of images. For a head that was converted without its backbone.

    Args:
        channels: channels of the feature maps.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.coarse_channels, self.fine_channels = channels, None
        self.mean, self.std = (0.0,) * channels, (1.0,) * channels

    def forward(self, features: Tensor) -> Features:
        return Features(features, None)


class TimmBackbone(Backbone):
    """A timm network without its classifier.

    Args:
        name: any timm model that supports `features_only` and `output_stride`, such as resnet101.
        output_stride: stride of the coarse features, 8, 16 or 32.
        stages: number of stages to use; None for all. A stage ends at each feature map that timm has at stride 4
            or coarser, before anything is dilated: layer1 to layer4 of a ResNet. Later stages are not built.
        multi_grid: dilation factors of the blocks of the last ResNet stage, such as (1, 2, 4).
        variant: "authors" is the ResNet of the paper's code, see `resnet_authors`. No ImageNet weights in PyTorch are
            published for it.
        dilation: rate of a block whose stride is removed to reach the output stride. "authors" gives this block the
            new rate. "timm" gives it the previous rate, and the new rate to the blocks after it. None selects "authors"
            for the authors' variant, and "timm" for the standard variant.
        top_features: for an EfficientNet, take the coarse features after the top convolution, batch norm and
            activation, like the paper's code: 2,560 channels for B7. If False, take them after the last block.
        with_fine: whether to return the stride-4 features.
        hub_weights: download timm's ImageNet weights.
    """

    def __init__(
        self,
        name: str,
        *,
        output_stride: OutputStride,
        stages: int | None = None,
        multi_grid: Sequence[int] | None = None,
        variant: ResNetVariant = "standard",
        dilation: Dilation | None = None,
        top_features: bool = False,
        with_fine: bool = False,
        hub_weights: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.output_stride = output_stride
        self.stages = stages
        if variant == "authors":
            if hub_weights:
                raise CaasegError(
                    f"backbone {name}: no ImageNet weights are published for the authors' variant; "
                    "use variant='standard', or pretrained=False, or pretrained=PATH with weights of your own"
                )
            _check_resnet(name, output_stride, "the authors' variant")
            net = _create(name, output_stride, None, **resnet_authors.STEM)
            resnet_authors.to_authors_resnet(net, output_stride, dilation or "authors")
        else:
            net = _create(name, output_stride, stages, pretrained=hub_weights)
            if dilation == "authors":
                _dilate_like_authors(net, name, stages)
        if multi_grid is not None:
            _check_resnet(name, output_stride, "multi_grid")
            if not hasattr(net, "layer4"):
                raise CaasegError(
                    f"multi_grid is {tuple(multi_grid)}, for the last stage of {name}, which stages={stages} does not "
                    "build; leave out one of the two"
                )
            _apply_multi_grid(net, tuple(multi_grid), name)
        self.top_features = top_features
        if top_features:
            _add_top(net, name, pretrained=hub_weights)
        self.net: Any = net
        reductions, channels = net.feature_info.reduction(), net.feature_info.channels()
        if with_fine and FINE_STRIDE not in reductions:
            raise CaasegError(
                f"backbone {name} has features of strides {reductions}; the decoder needs stride {FINE_STRIDE}: use "
                "decoder=False or another backbone"
            )
        self.fine_index = reductions.index(FINE_STRIDE) if with_fine else None
        self.fine_channels = channels[self.fine_index] if self.fine_index is not None else None
        self.coarse_channels = net.conv_head.out_channels if top_features else channels[-1]
        self.level_indices = [index for index, stride in enumerate(reductions) if stride >= FINE_STRIDE]
        self.level_strides = tuple(reductions[index] for index in self.level_indices)
        self.level_channels = tuple(channels[index] for index in self.level_indices)
        self.split_first_stage = variant == "authors"
        self.mean = tuple(net.pretrained_cfg["mean"])  # of the inputs that the weights were trained on
        self.std = tuple(net.pretrained_cfg["std"])
        if variant == "authors" and dilation != "timm":
            self.mean, self.std = resnet_authors.MEAN, resnet_authors.STD

    def forward(self, images: Tensor) -> Features:
        if self.split_first_stage:
            return self._forward_split(images)
        features = self.net(images)
        coarse = self.net.bn2(self.net.conv_head(features[-1])) if self.top_features else features[-1]
        fine = None if self.fine_index is None else features[self.fine_index]
        return Features(coarse, fine, tuple(features[index] for index in self.level_indices))

    def _forward_split(self, images: Tensor) -> Features:
        """Run the authors' variant: the last block of a stage has its stride, so a level is the input of that block."""
        net = self.net
        x = net.maxpool(net.act1(net.bn1(net.conv1(images))))
        levels = []
        for stage in (net.layer1, net.layer2, net.layer3):
            levels.append(stage[:-1](x))
            x = stage[-1](levels[-1])
        coarse = net.layer4(x)
        return Features(coarse, None if self.fine_index is None else levels[0], (*levels, coarse))


def _create(name: str, output_stride: int, stages: int | None, **options: Any) -> Any:
    """Return the timm model with dilated stages, or raise an error that lists the alternatives."""
    _check_stride(name, output_stride, stages)
    try:
        return _create_truncated(name, output_stride, stages, **options)
    except Exception as error:
        if not options.get("pretrained"):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(
            f"backbone {name}: its ImageNet weights could not be downloaded from the hub ({reason}); use "
            "pretrained=False, or a file that you have: pretrained=PATH, in timm or torchvision naming"
        ) from error


def _create_truncated(name: str, output_stride: int, stages: int | None, **options: Any) -> Any:
    """Return the timm model up to a stage, without checking its stride."""
    if stages is not None:
        options["out_indices"] = _out_indices(name, stages)
    net: Any = timm.create_model(name, features_only=True, output_stride=output_stride, **options)
    if stages is not None and isinstance(net, EfficientNetFeatures | MobileNetV3Features):
        used = net.feature_info.get_dicts()[-1]["stage"]
        net.blocks = nn.Sequential(*list(net.blocks)[:used])  # timm would compute the later blocks too
    return net


@cache
def _create_on_meta(name: str, output_stride: int, stages: int | None = None) -> Any:
    """Return the timm model on the meta device, to read only: it is created once."""
    with torch.device("meta"):
        return _create_truncated(name, output_stride, stages).eval()


@cache
def _out_indices(name: str, stages: int) -> tuple[int, ...]:
    """Return timm's indices of the feature maps up to the end of a stage."""
    with torch.device("meta"):
        net: Any = timm.create_model(name, features_only=True)
    if not isinstance(net, FeatureDictNet | EfficientNetFeatures | MobileNetV3Features):
        raise CaasegError(
            f"stages is {stages}, but backbone {name} cannot be truncated; leave stages out, or use a ResNet, an "
            "EfficientNet or a ConvNeXt"
        )
    levels, strides = net.feature_info.out_indices, net.feature_info.reduction()
    ends = [level for level, stride in zip(levels, strides, strict=True) if stride >= FINE_STRIDE]
    if stages > len(ends):
        raise CaasegError(f"stages is {stages}, but backbone {name} has {len(ends)}; use fewer, or none for all")
    return tuple(level for level in levels if level <= ends[stages - 1])


def _check_stride(name: str, output_stride: int, stages: int | None = None) -> None:
    """Raise an error unless timm has the model with this stride."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() returns all names"
        raise CaasegError(f"backbone {name!r} is not a timm model; {hint}")
    if not _has_stride(name, output_stride, stages):
        if stages is not None and _has_stride(name, output_stride):
            _out_indices(name, stages)  # raises a more specific error
        strides = [stride for stride in (8, 16, 32) if _has_stride(name, stride, stages)]
        supported = ", ".join(map(str, strides)) or "none of 8, 16 and 32"
        backbone = f"backbone {name}" if stages is None else f"backbone {name} with stages={stages}"
        raise CaasegError(f"{backbone} does not support output stride {output_stride}; it supports {supported}")


@cache
def _has_stride(name: str, output_stride: int, stages: int | None = None) -> bool:
    try:
        net = _create_on_meta(name, output_stride, stages)
        features = net(torch.empty(1, 3, 64, 64, device="meta"))
    except Exception:  # models raise many types for strides and sizes that they do not support
        return False
    expected = (net.feature_info.channels()[-1], 64 // output_stride, 64 // output_stride)
    return tuple(features[-1].shape[1:]) == expected


def unused_names(backbone: TimmBackbone) -> set[str]:
    """Return the names of a timm model's tensors that a backbone does not use: its classifier and unused stages."""
    stride = backbone.output_stride
    standard = _create_on_meta(backbone.name, stride, backbone.stages).state_dict()
    ours = {**standard, **backbone.net.state_dict()}  # a standard tensor that the authors' variant lacks is an error
    with torch.device("meta"):
        whole = [*timm.create_model(backbone.name).state_dict(), *_create_on_meta(backbone.name, stride).state_dict()]
    return {key for key in whole if flat_name(key, ours) not in ours}


def flat_name(name: str, ours: Mapping[str, Tensor]) -> str:
    """Return our name of a tensor: some of timm's feature networks write blocks.3.x as blocks_3.x."""
    flat = name.replace(".", "_", 1)
    return flat if name not in ours and flat in ours else name


def _dilate_like_authors(net: Any, name: str, stages: int | None) -> None:
    blocks, originals = residual_blocks(net), residual_blocks(_create_on_meta(name, 32, stages))
    rates = [convolution.dilation[0] for block in blocks for convolution in spatial_convolutions(block)]
    dilate_from_removed_strides(blocks, originals)
    if not rates or spatial_convolutions(blocks[-1])[-1].dilation[0] != rates[-1]:
        raise CaasegError(
            f"backbone {name}: dilation authors is known for ResNets and EfficientNets only; use dilation timm"
        )


def _add_top(net: Any, name: str, *, pretrained: bool) -> None:
    """Add the layers between the last block and the pooling of an EfficientNet to its feature network."""
    if not isinstance(net, EfficientNetFeatures):
        raise CaasegError(
            f"backbone {name} is not an EfficientNet, which top_features needs; use an EfficientNet, or leave out "
            "top_features"
        )
    whole: Any = timm.create_model(name, pretrained=pretrained)
    net.conv_head, net.bn2 = whole.conv_head, whole.bn2


def _check_resnet(name: str, output_stride: int, option: str) -> None:
    """Raise an error unless the network is a plain ResNet, which an option needs."""
    _check_stride(name, output_stride)
    net = _create_on_meta(name, output_stride)
    blocks = [block for stage in range(1, 5) for block in getattr(net, f"layer{stage}", ())]
    plain = {type(block) for block in blocks} <= {BasicBlock, Bottleneck}
    shortcuts = [block.downsample for block in blocks if plain and block.downsample is not None]
    if not blocks or not plain or not all(isinstance(shortcut[0], nn.Conv2d) for shortcut in shortcuts):
        raise CaasegError(
            f"backbone {name} is not a plain ResNet, which {option} needs; use a ResNet, or leave out {option}"
        )


def _apply_multi_grid(net: Any, grid: tuple[int, ...], name: str) -> None:
    stage = net.layer4
    if len(stage) != len(grid):
        raise CaasegError(
            f"multi_grid has {len(grid)} factors, {grid}, but the last stage of {name} has {len(stage)} blocks; "
            "expected one factor per block"
        )
    for block, factor in zip(stage, grid, strict=True):
        for convolution in spatial_convolutions(block):
            dilate(convolution, convolution.dilation[0] * factor)
