"""timm's networks as backbones: one fine and one coarse feature map, at the output stride asked for.

An output stride of 8 or 16 means that later stages are dilated instead of strided (Chen et al., DeepLab).
"""

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.config import OutputStride, ResNetVariant
from caaseg.torchvision_compat import declare_missing_operators

declare_missing_operators()  # timm imports torchvision

import timm  # noqa: E402

FINE_STRIDE = 4  # of the feature that the simple decoder reads


class Features(NamedTuple):
    """What a backbone gives."""

    coarse: Tensor  # (N, C, H/stride, W/stride), for the head
    fine: Tensor | None  # (N, C, H/4, W/4), for the decoder; None without one


class Backbone(nn.Module):
    """A timm network without its classifier.

    Args:
        name: any timm model that supports `features_only` and `output_stride`, such as resnet101.
        output_stride: how many input pixels a coarse feature stands for, 8 or 16.
        multi_grid: dilation factors of the blocks of the last ResNet stage, such as (1, 2, 4).
        variant: "authors" is the ResNet of the paper's code: three 3x3 convolutions (64, 64, 128) as stem, each
            stage's stride in its last block. No ImageNet weights are published for it.
        with_fine: whether the stride-4 feature is wanted.
        hub_weights: fetch timm's ImageNet weights from its hub.
    """

    def __init__(
        self,
        name: str,
        *,
        output_stride: OutputStride,
        multi_grid: Sequence[int] | None = None,
        variant: ResNetVariant = "standard",
        with_fine: bool = False,
        hub_weights: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        if variant == "authors":
            if hub_weights:
                raise ValueError(
                    f"backbone {name}: no ImageNet weights are published for the authors' variant; "
                    "use variant='standard', or pretrained=False, or pretrained=PATH with weights of your own"
                )
            net = _create(name, output_stride, stem_type="deep", stem_width=64)
            _check_resnet(net, name, "the authors' variant")
            _move_strides(net, output_stride)
        else:
            net = _create(name, output_stride, pretrained=hub_weights)
        if multi_grid is not None:
            _check_resnet(net, name, "multi_grid")
            _apply_multi_grid(net, tuple(multi_grid), name)
        self.net: Any = net
        reductions, channels = net.feature_info.reduction(), net.feature_info.channels()
        if with_fine and FINE_STRIDE not in reductions:
            raise ValueError(
                f"backbone {name} has features of strides {reductions}, none of {FINE_STRIDE}; "
                "the decoder needs one: use decoder=False or another backbone"
            )
        self.fine_index = reductions.index(FINE_STRIDE) if with_fine else None
        self.fine_channels: int | None = channels[self.fine_index] if self.fine_index is not None else None
        self.coarse_channels: int = channels[-1]
        self.split_first_stage = variant == "authors"
        self.mean: tuple[float, ...] = tuple(net.pretrained_cfg["mean"])  # of the inputs the weights were learned on
        self.std: tuple[float, ...] = tuple(net.pretrained_cfg["std"])

    def forward(self, images: Tensor) -> Features:
        if self.split_first_stage:
            return self._forward_split(images)
        features = self.net(images)
        return Features(features[-1], None if self.fine_index is None else features[self.fine_index])

    def _forward_split(self, images: Tensor) -> Features:
        """The authors' variant leaves stride 4 inside its first stage: the fine feature is taken before that block."""
        net = self.net
        x = net.maxpool(net.act1(net.bn1(net.conv1(images))))
        fine = net.layer1[:-1](x)
        coarse = net.layer4(net.layer3(net.layer2(net.layer1[-1](fine))))
        return Features(coarse, None if self.fine_index is None else fine)


def _create(name: str, output_stride: int, **options: Any) -> Any:
    """The timm model with dilated stages, or an error that says what would do."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() names them all"
        raise ValueError(f"backbone {name!r} is not a timm model; {hint}")
    if not _gives(name, output_stride):
        possible = [stride for stride in (8, 16, 32) if _gives(name, stride)]
        able = f"strides it can give: {', '.join(map(str, possible))}" if possible else "it gives none of 8, 16 and 32"
        raise ValueError(f"backbone {name} cannot give features of stride {output_stride}; {able}")
    try:
        return timm.create_model(name, features_only=True, output_stride=output_stride, **options)
    except Exception as error:
        if not options.get("pretrained"):
            raise
        raise ValueError(_hub_message(name, error)) from error


def _gives(name: str, output_stride: int) -> bool:
    try:
        with torch.device("meta"):
            net: Any = timm.create_model(name, features_only=True, output_stride=output_stride)
            features = net(torch.empty(1, 3, 64, 64))
    except Exception:  # whatever a model says to a stride or a size it does not know
        return False
    expected = (net.feature_info.channels()[-1], 64 // output_stride, 64 // output_stride)
    return tuple(features[-1].shape[1:]) == expected


def full_state_names(name: str) -> set[str]:
    """Names of all tensors of the whole timm model, its classifier included."""
    with torch.device("meta"):
        return set(timm.create_model(name).state_dict())


def _hub_message(name: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"backbone {name}: its ImageNet weights could not be fetched from the hub ({reason}); "
        "go on without them (pretrained=False), or give a file you have (pretrained=PATH, timm or torchvision naming)"
    )


def _check_resnet(net: Any, name: str, what: str) -> None:
    if not all(hasattr(net, part) for part in ("conv1", "layer1", "layer4")):
        raise ValueError(f"backbone {name} is not a ResNet, but {what} is a change of ResNets; leave it out")


def _spatial_convolutions(block: nn.Module) -> list[nn.Conv2d]:
    return [conv for conv in block.modules() if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3)]


def _dilate(convolution: nn.Conv2d, rate: int) -> None:
    convolution.dilation = convolution.padding = (rate, rate)


def _apply_multi_grid(net: Any, grid: tuple[int, ...], name: str) -> None:
    stage = net.layer4
    if len(stage) != len(grid):
        raise ValueError(
            f"multi_grid has {len(grid)} factors, {grid}, but the last stage of {name} has {len(stage)} blocks; "
            "give one factor a block"
        )
    for block, factor in zip(stage, grid, strict=True):
        for convolution in _spatial_convolutions(block):
            _dilate(convolution, convolution.dilation[0] * factor)


def _move_strides(net: Any, output_stride: int) -> None:
    """Put each stage's stride into its last block; where the output stride is reached, dilate what follows instead."""
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
