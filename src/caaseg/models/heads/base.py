"""Base class of all heads, and the layers that most of them share.

A head turns the backbone's coarse feature map into the feature map that is classified per pixel. To add a head,
subclass `Head`, or `AttentionHead` if only the attention block is new, and pass the class to `create_model`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from caaseg.attention import ChannelizedAxialAttention, SelfAttention
from caaseg.attention.projection import projection
from caaseg.config import Architecture
from caaseg.errors import CaasegError

DROPOUT = 0.1

AttentionBlock = ChannelizedAxialAttention | SelfAttention


class HeadFeatures(NamedTuple):
    """Output of a head. Each feature map gets its own classifier."""

    fused: Tensor  # (N, out_channels, H, W)
    branches: dict[str, Tensor]  # branch name -> (N, branch_channels, H, W)
    regularized: Tensor | None = None  # (N, C, H, W), output of `Head.car`; None without it
    logits: Mapping[str, Tensor] = MappingProxyType({})  # name -> (N, K, h, w): classified here
    presence: Tensor | None = None  # (N, K), logits of the classes that an image contains; None without them


class ConflictWording(NamedTuple):
    """Texts of the conflict study for one design of attention."""

    lead: str
    lost: str
    won: str
    disagree: str | None  # None for a design with a single branch
    caution: str


class Head(nn.Module):
    """Base class of heads, constructed as `HeadClass(in_channels, config)`.

    Subclasses set `out_channels`, and `branch_channels` if they have branches, in `__init__`, and implement
    `forward(features) -> HeadFeatures` for features (N, in_channels, H, W).

    A head with `levels` reads several feature maps of the backbone: `in_channels` is then a tuple of channels, and
    `features` a list of maps (N, C, h, w), one per entry of `levels`.
    """

    title: ClassVar[str] = "custom head"
    """Name for tables and figures."""
    levels: ClassVar[tuple[int, ...] | None] = None
    """Indices of the backbone stages whose feature maps the head reads, such as (0, 1, 2, 3) for strides 4 to 32, or
    (-2, -1) for the last two stages. None for a head that reads the coarse feature map alone."""
    branches: ClassVar[tuple[str, ...]] = ()
    """Names of the feature maps in `HeadFeatures.branches`."""
    needs_two_images: ClassVar[bool] = False
    """Whether training needs two images per device and step, for batch statistics of 1 x 1 feature maps."""
    views: ClassVar[tuple[str, ...]] = ()
    """Predictions that the conflict study compares; the last is the model's own. Empty if it does not apply."""
    averages_gates: ClassVar[bool] = False
    """Whether the views are predictions with averaged gates, instead of the branches."""
    conflict_wording: ClassVar[ConflictWording | None] = None
    """Texts of the conflict study; None if it does not apply."""
    car_channels: ClassVar[int] = 512
    """Maximum number of channels of `car`."""
    without_attention: ClassVar[str] = "This head has no attention that can be shown per pixel."
    """Shown instead of attention maps if `attention_block()` is None."""

    out_channels: int
    branch_channels: int = 0
    classifier: nn.Module
    """The head's own layer from features to logits of the classes, if it has one: initialized anew for other
    classes."""
    car: nn.Conv2d | None
    """Linear layer whose output class-aware regularization (CAR) acts on; None or not set in a model without CAR."""

    def build_car(self, in_channels: int, kind: type[nn.Conv2d] = nn.Conv2d) -> nn.Conv2d:
        """Return the linear 1x1 layer of CAR, Glorot-uniform with zero bias, like the authors."""
        convolution = kind(in_channels, min(in_channels, self.car_channels), 1)
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        return convolution

    @classmethod
    def read_levels(cls, config: Architecture) -> tuple[int, ...] | None:
        """Return the entries of `levels` that the head reads with these settings."""
        return cls.levels

    def attention_block(self) -> AttentionBlock | None:
        """Return the block whose attention can be explained per pixel, or None."""
        return None


class FusionHead(Head):
    """Base class of heads without branches. They end in the linear layer of CAR, if configured, and in dropout.

    Subclasses call `build_end` last in `__init__`, and return `self.end(fused)` from `forward`.
    """

    def build_end(self, channels: int, config: Architecture) -> None:
        """Set `car`, `dropout` and `out_channels` for fused features of some channels."""
        self.car = self.build_car(channels) if config.car else None
        self.dropout = nn.Dropout(DROPOUT)
        self.out_channels = channels if self.car is None else self.car.out_channels

    def end(self, fused: Tensor) -> HeadFeatures:
        """Return the output of the head for fused features, (N, C, H, W)."""
        linear = None if self.car is None else self.car(fused)
        return HeadFeatures(self.dropout(fused if linear is None else linear), {}, linear)


class AttentionHead(Head, ABC):
    """The authors' layers around an attention block: entry and exit convolutions, and an image-level branch.

    Args:
        in_channels: channels of the backbone's coarse feature map.
        config: architecture settings; `config.channels` is the width of these layers.
    """

    needs_two_images = True

    def __init__(self, in_channels: int, config: Architecture) -> None:
        super().__init__()
        channels = config.channels
        block = self.build_block(config)
        self.entry = projection(in_channels, channels, kernel_size=3)
        self.block = block
        self.exit = projection(channels, channels)
        self.image_level = projection(in_channels, channels)
        self.out_channels = config.bottleneck_channels
        self.branch_channels = channels
        if config.car:
            self.car = self.build_car(2 * channels, ImageBiasedConvolution)
            self.bottleneck = projection(self.car.out_channels, self.out_channels)
        else:
            self.car = None
            self.bottleneck = projection(2 * channels, self.out_channels, kind=ImageBiasedConvolution)
        self.dropout = nn.Dropout(DROPOUT)

    @abstractmethod
    def build_block(self, config: Architecture) -> nn.Module:
        """Return the attention block: (N, config.channels, H, W) -> the same shape."""

    def attend(self, features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Apply the block. Return its output and the branches by name, all (N, C, H, W)."""
        return self.block(features), {}

    def forward(self, features: Tensor) -> HeadFeatures:
        check_two_images(features, self.image_level[1])
        attended, branches = self.attend(self.entry(features))  # (N, C, H, W)
        image = self.image_level(mean_over_image(features))  # (N, C, 1, 1)
        if self.car is not None:
            linear = self.car(self.exit(attended), image)  # (N, C', H, W)
            return HeadFeatures(self.dropout(self.bottleneck(linear)), branches, linear)
        convolution, *rest = self.bottleneck
        fused: Tensor = convolution(self.exit(attended), image)  # (N, out_channels, H, W)
        for module in rest:
            fused = module(fused)
        return HeadFeatures(self.dropout(fused), branches)

    def attention_block(self) -> AttentionBlock | None:
        return self.block if isinstance(self.block, AttentionBlock) else None


def check_two_images(features: Tensor, norm: nn.Module) -> None:
    """Raise an error if a batch norm of 1 x 1 maps would train on a single image."""
    if norm.training and isinstance(norm, nn.BatchNorm2d) and features.shape[0] == 1:
        raise CaasegError(
            "a batch of one image cannot be trained on: batch normalization of the image-level branch needs two; "
            "use two or more images per device, or keep batch normalization in evaluation mode"
        )


class ImageBiasedConvolution(nn.Conv2d):
    """1 x 1 convolution of feature maps concatenated with image-level features.

    Image-level features are the same at every pixel, so their part of the convolution is one bias per image. The
    concatenated maps, twice the size, are never built.
    """

    def forward(self, maps: Tensor, image: Tensor) -> Tensor:  # type: ignore[override]
        """(N, C, H, W) and (N, C', 1, 1) -> (N, out, H, W), with weights for C + C' channels."""
        c = maps.shape[1]
        return F.conv2d(maps, self.weight[:, :c], self.bias) + F.conv2d(image, self.weight[:, c:])


def mean_over_image(features: Tensor) -> Tensor:
    """Return the mean over all pixels: (N, C, H, W) -> (N, C, 1, 1)."""
    if torch.is_grad_enabled() and features.requires_grad:
        mean: Tensor = _Mean.apply(features)  # type: ignore[no-untyped-call]
        return mean
    return features.mean((2, 3), keepdim=True)


class _Mean(torch.autograd.Function):
    """Mean over pixels whose gradient is an expanded view. torch's mean allocates it, and not channels last."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor) -> Tensor:
        return features.mean((2, 3), keepdim=True)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        expanded: Tensor = (grad / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape)
        return expanded
