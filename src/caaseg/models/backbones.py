"""Backbones: timm networks without their classifier, or modules of your own.

An output stride of 8 or 16 is reached by dilating the later stages instead of striding (Chen et al., DeepLab).
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from caaseg.config import OutputStride, ResNetVariant
from caaseg.torchvision_compat import declare_missing_operators

declare_missing_operators()  # timm imports torchvision: import its classes from this module

import timm  # noqa: E402
from timm.models import FeatureDictNet as FeatureDictNet  # noqa: E402
from timm.models.efficientnet import EfficientNetFeatures  # noqa: E402
from timm.models.mobilenetv3 import MobileNetV3Features  # noqa: E402
from timm.models.resnet import BasicBlock as BasicBlock  # noqa: E402
from timm.models.resnet import Bottleneck as Bottleneck  # noqa: E402

from caaseg.errors import CaasegError  # noqa: E402

FINE_STRIDE = 4  # of the feature map that the simple decoder reads, and of the first stage


class Features(NamedTuple):
    """Output of a backbone."""

    coarse: Tensor  # (N, coarse_channels, H/stride, W/stride), for the head
    fine: Tensor | None  # (N, fine_channels, H/4, W/4), for the decoder; None without one


class Backbone(nn.Module):
    """Protocol of backbones. `create_model` accepts any module with these and `forward(images) -> Features`."""

    coarse_channels: int
    fine_channels: int | None
    """None if `Features.fine` is None."""
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


class TimmBackbone(Backbone):
    """A timm network without its classifier.

    Args:
        name: any timm model that supports `features_only` and `output_stride`, such as resnet101.
        output_stride: stride of the coarse features, 8 or 16.
        stages: number of stages to use; None for all. A stage ends at each feature map that timm has at stride 4
            or coarser, before anything is dilated: layer1 to layer4 of a ResNet. Later stages are not built.
        multi_grid: dilation factors of the blocks of the last ResNet stage, such as (1, 2, 4).
        variant: "authors" is the ResNet of the paper's code: three 3x3 convolutions (64, 64, 128) as stem, each
            stage's stride in its last block. No ImageNet weights are published for it.
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
            net = _create(name, output_stride, None, stem_type="deep", stem_width=64)
            _move_strides(net, output_stride)
        else:
            net = _create(name, output_stride, stages, pretrained=hub_weights)
        if multi_grid is not None:
            _check_resnet(name, output_stride, "multi_grid")
            if not hasattr(net, "layer4"):
                raise CaasegError(
                    f"multi_grid is {tuple(multi_grid)}, for the last stage of {name}, which stages={stages} does not "
                    "build; leave out one of the two"
                )
            _apply_multi_grid(net, tuple(multi_grid), name)
        self.net: Any = net
        reductions, channels = net.feature_info.reduction(), net.feature_info.channels()
        if with_fine and FINE_STRIDE not in reductions:
            raise CaasegError(
                f"backbone {name} has features of strides {reductions}, none of {FINE_STRIDE}; "
                "the decoder needs one: use decoder=False or another backbone"
            )
        self.fine_index = reductions.index(FINE_STRIDE) if with_fine else None
        self.fine_channels = channels[self.fine_index] if self.fine_index is not None else None
        self.coarse_channels = channels[-1]
        self.split_first_stage = variant == "authors"
        self.mean = tuple(net.pretrained_cfg["mean"])  # of the inputs that the weights were trained on
        self.std = tuple(net.pretrained_cfg["std"])

    def forward(self, images: Tensor) -> Features:
        if self.split_first_stage:
            return self._forward_split(images)
        features = self.net(images)
        return Features(features[-1], None if self.fine_index is None else features[self.fine_index])

    def _forward_split(self, images: Tensor) -> Features:
        """The authors' variant leaves stride 4 in the last block of its first stage: the fine features precede it."""
        net = self.net
        x = net.maxpool(net.act1(net.bn1(net.conv1(images))))
        fine = net.layer1[:-1](x)
        coarse = net.layer4(net.layer3(net.layer2(net.layer1[-1](fine))))
        return Features(coarse, None if self.fine_index is None else fine)


def _create(name: str, output_stride: int, stages: int | None, **options: Any) -> Any:
    """Return the timm model with dilated stages, or raise an error that lists the alternatives."""
    _create_on_meta(name, output_stride, stages)
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
    """Return the timm model up to a stage, without a check of its stride."""
    if stages is not None:
        options["out_indices"] = _out_indices(name, stages)
    net: Any = timm.create_model(name, features_only=True, output_stride=output_stride, **options)
    if stages is not None and isinstance(net, EfficientNetFeatures | MobileNetV3Features):
        used = net.feature_info.get_dicts()[-1]["stage"]
        net.blocks = nn.Sequential(*list(net.blocks)[:used])  # timm would compute the others too
    return net


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


def _create_on_meta(name: str, output_stride: int, stages: int | None = None) -> Any:
    """Return the timm model on the meta device, after a check that it has the stride."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() names them all"
        raise CaasegError(f"backbone {name!r} is not a timm model; {hint}")
    if (net := _create_if_supported(name, output_stride, stages)) is None:
        if stages is not None and _create_if_supported(name, output_stride) is not None:
            _out_indices(name, stages)  # has a message of its own
        strides = [stride for stride in (8, 16, 32) if _create_if_supported(name, stride, stages) is not None]
        able = f"it supports {', '.join(map(str, strides))}" if strides else "it supports none of 8, 16 and 32"
        what = f"backbone {name}" if stages is None else f"backbone {name} with stages={stages}"
        raise CaasegError(f"{what} does not support output stride {output_stride}; {able}")
    return net


def _create_if_supported(name: str, output_stride: int, stages: int | None = None) -> Any:
    try:
        with torch.device("meta"):
            net = _create_truncated(name, output_stride, stages)
            features = net(torch.empty(1, 3, 64, 64))
    except Exception:  # models raise many types for strides and sizes that they do not support
        return None
    expected = (net.feature_info.channels()[-1], 64 // output_stride, 64 // output_stride)
    return net if tuple(features[-1].shape[1:]) == expected else None


def unused_names(name: str, output_stride: int, stages: int | None) -> set[str]:
    """Return the names of a timm model's tensors that a backbone does not use: its classifier and unused stages."""
    ours = _create_on_meta(name, output_stride, stages).state_dict()
    with torch.device("meta"):
        whole = [*timm.create_model(name).state_dict(), *_create_truncated(name, output_stride, None).state_dict()]
    return {key for key in whole if flat_name(key, ours) not in ours}


def flat_name(name: str, ours: Mapping[str, Tensor]) -> str:
    """Return our name of a tensor: some of timm's feature networks write blocks.3.x as blocks_3.x."""
    flat = name.replace(".", "_", 1)
    return flat if name not in ours and flat in ours else name


def _check_resnet(name: str, output_stride: int, what: str) -> None:
    """Raise an error unless the network is a plain ResNet."""
    net = _create_on_meta(name, output_stride)
    blocks = [block for stage in range(1, 5) for block in getattr(net, f"layer{stage}", ())]
    plain = {type(block) for block in blocks} <= {BasicBlock, Bottleneck}
    shortcuts = [block.downsample for block in blocks if plain and block.downsample is not None]
    if not blocks or not plain or not all(isinstance(shortcut[0], nn.Conv2d) for shortcut in shortcuts):
        raise CaasegError(f"backbone {name} is not a plain ResNet, which {what} needs; leave it out")


def _spatial_convolutions(block: nn.Module) -> list[nn.Conv2d]:
    return [conv for conv in block.modules() if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3)]


def _dilate(convolution: nn.Conv2d, rate: int) -> None:
    convolution.dilation = convolution.padding = (rate, rate)


def _apply_multi_grid(net: Any, grid: tuple[int, ...], name: str) -> None:
    stage = net.layer4
    if len(stage) != len(grid):
        raise CaasegError(
            f"multi_grid has {len(grid)} factors, {grid}, but the last stage of {name} has {len(stage)} blocks; "
            "expected one factor per block"
        )
    for block, factor in zip(stage, grid, strict=True):
        for convolution in _spatial_convolutions(block):
            _dilate(convolution, convolution.dilation[0] * factor)


def _move_strides(net: Any, output_stride: int) -> None:
    """Move each stage's stride to its last block; dilate instead once the output stride is reached."""
    stride, rate = 4, 1  # after the stem
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        for block in stage:
            step = 2 if block is stage[-1] and stage is not net.layer4 else 1
            now = step if stride < output_stride else 1
            convolutions = _spatial_convolutions(block)
            for convolution in convolutions:
                convolution.stride = (1, 1)
                _dilate(convolution, rate)
            convolutions[0].stride = (now, now)
            if block.downsample is not None:
                block.downsample[0].stride = (now, now)
            elif now == 2:
                block.downsample = nn.MaxPool2d(1, stride=2)  # the shortcut skips the same pixels
            stride *= now
            rate *= step // now
