"""Backbones: timm networks without their classifier, or modules of your own.

An output stride of 8 or 16 is reached by dilating the later stages instead of striding (Chen et al., DeepLab), or by a
neck after the network.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from caaseg.config import Dilation, OutputStride, ResNetVariant
from caaseg.errors import CaasegError
from caaseg.models import resnet_authors
from caaseg.models.dilation import dilate, dilate_from_removed_strides, residual_blocks, spatial_convolutions
from caaseg.models.resize import cells
from caaseg.models.timm_networks import (
    FINE_STRIDE,
    FINEST_STRIDE,
    BasicBlock,
    Bottleneck,
    EfficientNetFeatures,
    classifier_on_meta,
    create_classifier,
    create_network,
    group_with_matcher,
    layout,
    name_in_network,
    nchw,
    network_on_meta,
)


class Features(NamedTuple):
    """Output of a backbone."""

    coarse: Tensor  # (N, coarse_channels, H/stride, W/stride), for the head
    fine: Tensor | None  # (N, fine_channels, H/4, W/4), for the decoder; None without a decoder
    levels: tuple[Tensor, ...] = ()  # (N, C, h, w) per stage, from fine to coarse, for necks and heads with `levels`
    finest: Tensor | None = None  # (N, finest_channels, H/2, W/2), for a decoder of stride 2; None without one


class Backbone(nn.Module):
    """Protocol of backbones: `create_model` accepts modules with these attributes and `forward(images) -> Features`."""

    coarse_channels: int
    fine_channels: int | None
    """Channels of `Features.fine`; None if that is None."""
    level_channels: tuple[int, ...] = ()
    """Channels of `Features.levels`."""
    finest_channels: int | None = None
    """Channels of `Features.finest`; None if that is None."""
    mean: tuple[float, ...]
    """RGB mean that images are normalized with, for values from 0 to 1."""
    std: tuple[float, ...]
    """RGB standard deviation that images are normalized with."""


def check_backbone(module: nn.Module, *, with_fine: bool, with_finest: bool = False) -> Backbone:
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
    if with_finest and getattr(backbone, "finest_channels", None) is None:
        raise CaasegError(
            f"backbone {type(module).__name__} has no features of stride 2 (finest_channels is None); decoder_stride 2 "
            "needs them: use decoder_stride=4"
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
    """A timm network without its classifier. It takes images of any size.

    Feature maps have ceil(H / stride) x ceil(W / stride) cells: images are padded with zeros, the mean color, where a
    network needs it, and the feature maps are cropped.

    Args:
        name: a timm model, such as resnet101.
        output_stride: stride of the coarse features, 8, 16 or 32; None for the network without dilation, for a neck.
        stages: number of stages to use; None for all. Each feature map of stride 4 or coarser in timm's undilated
            network is the end of a stage, such as layer1 to layer4 of a ResNet. Later stages are not built.
        multi_grid: dilation factors of the blocks of the last ResNet stage, such as (1, 2, 4).
        variant: "authors" is the ResNet of the paper's code, see `resnet_authors`. No ImageNet weights in PyTorch are
            published for it.
        dilation: dilation rate of a block whose stride is removed to reach the output stride. "authors" gives this
            block the new rate. "timm" gives it the previous rate, and the new rate to the blocks after it. None selects
            "authors" for the authors' variant, and "timm" for the standard variant.
        top_features: for an EfficientNet, take the coarse features after the top convolution, batch norm and
            activation, like the paper's code: 2,560 channels for B7. If False, take them after the last block.
        with_fine: whether to return the stride-4 features.
        with_finest: whether to return the stride-2 features.
        drop_path: drop path rate (stochastic depth) of the last block in training.
        block_dropout: dropout rate before the last convolution of each block of a ResNet in training.
        hub_weights: download timm's ImageNet weights.
    """

    def __init__(
        self,
        name: str,
        *,
        output_stride: OutputStride | None,
        stages: int | None = None,
        multi_grid: Sequence[int] | None = None,
        variant: ResNetVariant = "standard",
        dilation: Dilation | None = None,
        top_features: bool = False,
        with_fine: bool = False,
        with_finest: bool = False,
        drop_path: float = 0.0,
        block_dropout: float = 0.0,
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
        found = layout(name, output_stride, stages)
        options = resnet_authors.STEM if variant == "authors" else {"pretrained": hub_weights}
        net = create_network(name, found, stages, drop_path=drop_path, **options)
        if variant == "authors":
            assert output_stride is not None
            resnet_authors.to_authors_resnet(net, output_stride, dilation or "authors")
        elif dilation == "authors":
            _dilate_like_authors(net, name, stages)
        if multi_grid is not None:
            _check_resnet(name, output_stride, "multi_grid")
            if not hasattr(net, "layer4"):
                raise CaasegError(
                    f"multi_grid is {tuple(multi_grid)}, but stages={stages} leaves out the last stage of {name}, to "
                    "which multi_grid applies; leave out one of the two"
                )
            _apply_multi_grid(net, tuple(multi_grid), name)
        if block_dropout:
            _add_dropout(net, name, block_dropout)
        self.top_features = top_features
        if top_features:
            _add_top(net, name, pretrained=hub_weights)
        self.net: Any = net
        if with_fine and FINE_STRIDE not in found.strides:
            raise CaasegError(
                f"backbone {name} has features of strides {list(found.level_strides)}; the decoder needs stride "
                f"{FINE_STRIDE}: use decoder=False{', neck sfp' if found.blocks else ''} or another backbone"
            )
        if with_finest and FINEST_STRIDE not in found.strides:
            raise CaasegError(
                f"backbone {name} has features of strides {list(found.level_strides)}; decoder_stride 2 needs stride "
                f"{FINEST_STRIDE}: use decoder_stride=4 or another backbone, such as a ResNet"
            )
        self.layout = found
        self.finest_index = found.strides.index(FINEST_STRIDE) if with_finest else None
        self.fine_level = found.level_strides.index(FINE_STRIDE) if with_fine else None
        self.level_strides = found.level_strides
        self.level_channels = tuple(found.channels[index] for index in found.levels)
        self.fine_channels = None if self.fine_level is None else self.level_channels[self.fine_level]
        self.coarse_channels = net.conv_head.out_channels if top_features else found.channels[-1]
        self.split_first_stage = variant == "authors"
        self.finest_channels = None if self.finest_index is None else found.channels[self.finest_index]
        if with_finest and variant == "authors":
            self.finest_channels = net.bn1.num_features  # the authors' stem has more channels
        self.mean = tuple(net.pretrained_cfg["mean"])  # of the inputs that the weights were trained on
        self.std = tuple(net.pretrained_cfg["std"])
        if variant == "authors" and dilation != "timm":
            self.mean, self.std = resnet_authors.MEAN, resnet_authors.STD
        self.frozen_names: frozenset[str] = frozenset()
        """Names of the parameters of `net` that `freeze_stages` has frozen."""

    def forward(self, images: Tensor) -> Features:
        if self.split_first_stage:
            return self._forward_split(images)
        height, width = images.shape[2:]
        multiple = self.layout.multiple
        if multiple > 1:
            right, below = (cells(side, multiple) * multiple - side for side in (width, height))
            images = pad(images, (0, right, 0, below))
        maps = self.net(images)
        levels = tuple(self._crop(maps[index], index, height, width) for index in self.layout.levels)
        coarse = self.net.bn2(self.net.conv_head(levels[-1])) if self.top_features else levels[-1]
        index = self.finest_index
        finest = None if index is None else self._crop(maps[index], index, height, width)
        return Features(coarse, None if self.fine_level is None else levels[self.fine_level], levels, finest)

    def _crop(self, features: Tensor, index: int, height: int, width: int) -> Tensor:
        """Return a feature map of a padded image as (N, C, ceil(H / stride), ceil(W / stride))."""
        features, stride = nchw(features, is_nhwc=self.layout.is_nhwc), self.layout.strides[index]
        if stride is None or self.layout.multiple in (1, stride):
            return features
        return pad(
            features, (0, cells(width, stride) - features.shape[3], 0, cells(height, stride) - features.shape[2])
        )

    def _forward_split(self, images: Tensor) -> Features:
        """Run the authors' variant. The last block of a stage is strided, so a level is the input of that block."""
        net = self.net
        stem = net.act1(net.bn1(net.conv1(images)))
        x = net.maxpool(stem)
        levels = []
        for stage in (net.layer1, net.layer2, net.layer3):
            levels.append(stage[:-1](x))
            x = stage[-1](levels[-1])
        coarse = net.layer4(x)
        return Features(
            coarse,
            None if self.fine_level is None else levels[0],
            (*levels, coarse),
            None if self.finest_index is None else stem,
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Frozen stages stay in evaluation mode, so that their batch norm statistics do not change."""
        super().train(mode)
        for name, module in self.net.named_modules() if self.frozen_names else ():
            parameters = [parameter for parameter, _ in module.named_parameters(prefix=name)]
            if parameters and self.frozen_names.issuperset(parameters):
                module.eval()
        return self

    def freeze_stages(self, number: int) -> None:
        """Freeze the weights and batch norm statistics of the first stages."""
        layers = self.layers(coarse=True, option="frozen_stages")
        if number > max(layers.values()):
            raise CaasegError(
                f"frozen_stages is {number}, but backbone {self.name} has {max(layers.values())} stages; use fewer"
            )
        self.frozen_names = frozenset(name for name, layer in layers.items() if number and layer <= number)
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name not in self.frozen_names | self.layout.unused)
        self.train(self.training)

    def layers(self, *, coarse: bool, option: str) -> dict[str, int]:
        """Return timm's layer number of each parameter of `net`. The stem is layer 0.

        A parameter without a number, such as one of a downsampling between stages, gets the number of the previous one.

        Args:
            coarse: number stages instead of blocks, if the network has stages.
            option: setting that needs the layer numbers, for the error message.
        """
        whole = classifier_on_meta(self.name)
        ours = dict(self.net.named_parameters())
        theirs: dict[Any, str] = {name_in_network(name, ours): name for name, _ in whole.named_parameters()}
        pairs = [(theirs.get(name, str(name)), None) for name in ours]
        numbers: dict[str, int] = {}
        if hasattr(whole, "group_matcher"):
            matcher = whole.group_matcher(coarse=coarse)
            numbers = group_with_matcher(iter([*pairs, (UNMATCHED, None)]), matcher, reverse=True)
        found, layer = {}, 0
        for (timm_name, _), name in zip(pairs, ours, strict=True):
            number = numbers.get(timm_name, 0)
            layer = layer if number == numbers.get(UNMATCHED) else number
            found[name] = layer
        if not layer:
            raise CaasegError(
                f"backbone {self.name}: timm does not number its layers, but {option} needs these numbers; leave "
                f"{option} out, or use another backbone"
            )
        return found

    def names_without_weight_decay(self) -> set[str]:
        """Return the names of the parameters that timm trains without weight decay, such as position embeddings."""
        whole = classifier_on_meta(self.name)
        listed = whole.no_weight_decay() if hasattr(whole, "no_weight_decay") else ()
        ours = dict(self.net.named_parameters())
        return {name_in_network(name, ours) for name in listed} & ours.keys()

    def checkpoint_gradients(self) -> None:
        """Recompute activations in the backward pass instead of storing them.

        timm recomputes blocks or stages. The statistics of batch norm are updated once, not again when a block is
        recomputed.
        """
        inner = [module for module in self.net.modules() if module is not self.net and hasattr(module, FLAG)]
        for module in inner or [self.net]:
            setattr(module, FLAG, True)
        for module in self.net.children():
            if hasattr(module, "inplace"):  # an in-place activation would change the stored input of a checkpoint
                module.inplace = False
        reason = self._why_not_recomputed()
        if reason is not None:
            raise CaasegError(
                f"backbone {self.name} does not support gradient_checkpointing ({reason}); leave it out, or use "
                "another backbone"
            )
        for module in self.net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.register_forward_pre_hook(_stop_tracking)
                module.register_forward_hook(_resume_tracking, always_call=True)

    def _why_not_recomputed(self) -> str | None:
        """Return why the backward pass of a small image recomputes no modules, or None if it recomputes some."""
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        if not weights:
            return "no weight is trained"
        recomputed: set[bool] = set()
        hooks = [
            module.register_forward_pre_hook(lambda *_: recomputed.add(_is_in_backward()))
            for module in self.net.modules()
        ]
        mode = self.training
        self.eval()  # batch norm statistics do not change
        try:
            images = weights[0].new_zeros(1, 3, *2 * [max(self.layout.multiple, max(self.level_strides))])
            torch.autograd.grad(self(images).coarse.sum(), weights, allow_unused=True)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self.train(mode)
            for hook in hooks:
                hook.remove()
        return None if True in recomputed else "timm does not recompute any of its modules"


FLAG = "grad_checkpointing"  # attribute of timm's modules
UNMATCHED = "-"  # not the name of a parameter; timm gives such names the number of the classifier


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _stop_tracking(norm: Any, _: Any) -> None:
    """Keep recomputed batch norm from updating its statistics: the forward pass has already updated them."""
    norm.is_recomputed = norm.training and _is_in_backward()
    if norm.is_recomputed:
        norm.own_momentum, norm.momentum = norm.momentum, 0.0


def _resume_tracking(norm: Any, _: Any, __: Any) -> None:
    if norm.is_recomputed:
        norm.momentum = norm.own_momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.sub_(1)


def unused_names(backbone: TimmBackbone) -> set[str]:
    """Return the names of a timm model's tensors that a backbone does not use: its classifier and unused stages."""
    standard = network_on_meta(backbone.name, backbone.output_stride, backbone.stages).state_dict()
    ours = {**standard, **backbone.net.state_dict()}  # a standard tensor that the authors' variant lacks is an error
    whole = [*classifier_on_meta(backbone.name).state_dict(), *network_on_meta(backbone.name, None).state_dict()]
    return {key for key in whole if name_in_network(key, ours) not in ours}


def _dilate_like_authors(net: Any, name: str, stages: int | None) -> None:
    blocks, originals = residual_blocks(net), residual_blocks(network_on_meta(name, None, stages))
    rates = [convolution.dilation[0] for block in blocks for convolution in spatial_convolutions(block)]
    dilate_from_removed_strides(blocks, originals)
    if not rates or spatial_convolutions(blocks[-1])[-1].dilation[0] != rates[-1]:
        raise CaasegError(
            f"backbone {name}: dilation authors supports only ResNets and EfficientNets; use dilation timm"
        )


def _add_dropout(net: Any, name: str, rate: float) -> None:
    """Add dropout before the last convolution of each residual block, instead of timm's drop block."""
    blocks = residual_blocks(net)
    if not blocks or not all(isinstance(block, BasicBlock | Bottleneck) for block in blocks):
        raise CaasegError(f"block_dropout needs a ResNet, but the backbone is {name}; use a ResNet, or leave it out")
    for block in blocks:
        block.drop_block = nn.Dropout(rate)  # timm applies it before ReLU; after ReLU the result would be the same


def _add_top(net: Any, name: str, *, pretrained: bool) -> None:
    """Add the layers between the last block and the pooling of an EfficientNet to its feature network."""
    if not isinstance(net, EfficientNetFeatures):
        raise CaasegError(
            f"backbone {name} is not an EfficientNet, which top_features needs; use an EfficientNet, or leave out "
            "top_features"
        )
    whole = create_classifier(name, pretrained=pretrained)
    net.conv_head, net.bn2 = whole.conv_head, whole.bn2


def _check_resnet(name: str, output_stride: int | None, option: str) -> None:
    """Raise an error unless the network is a plain ResNet, which an option needs."""
    net = network_on_meta(name, output_stride)
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
