"""timm networks without their classifier, and the measured strides of their feature maps.

timm does not state which networks respect `output_stride`, or which image sizes they take. Some ignore the option, some
take a single size, and some round sizes down. So each network is run once on the meta device, which computes only
shapes.
"""

import difflib
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.config import NeckName
from caaseg.errors import CaasegError
from caaseg.models.families import weights_of
from caaseg.torchvision_compat import declare_missing_operators

declare_missing_operators()  # timm imports torchvision: import its classes from this module

import timm  # noqa: E402
from timm.layers.drop import DropPath  # noqa: E402
from timm.layers.norm import LayerNorm2d as LayerNorm2d  # noqa: E402
from timm.models import FeatureDictNet as FeatureDictNet  # noqa: E402
from timm.models import davit as davit  # noqa: E402
from timm.models._features import FeatureGetterNet as FeatureGetterNet  # noqa: E402
from timm.models._manipulate import group_with_matcher as group_with_matcher  # noqa: E402
from timm.models.efficientnet import EfficientNetFeatures as EfficientNetFeatures  # noqa: E402
from timm.models.mobilenetv3 import MobileNetV3Features  # noqa: E402
from timm.models.resnet import BasicBlock as BasicBlock  # noqa: E402
from timm.models.resnet import Bottleneck as Bottleneck  # noqa: E402
from timm.models.swin_transformer import SwinTransformerBlock as SwinTransformerBlock  # noqa: E402
from timm.models.swin_transformer_v2 import SwinTransformerV2Block as SwinTransformerV2Block  # noqa: E402

FINEST_STRIDE = 2
"""Stride of the feature map that the simple decoder reads for a result of stride 2."""
FINE_STRIDE = 4
"""Stride of the feature map that the simple decoder reads, and of the first stage."""
OUTPUT_STRIDES = (8, 16, 32)
PYRAMID_STRIDES = (8, 16, 32)
"""Strides of the feature maps that the neck jpu joins."""
NUM_LEVELS = 4
"""Number of feature maps that are taken from a plain ViT, one after each quarter of its blocks."""
PROBE = (65, 96)
"""Height and width of the first image on the meta device. One is a multiple of all strides, the other is not."""
ANY_SIZE: tuple[dict[str, Any], ...] = ({}, {"dynamic_img_size": True}, {"strict_img_size": False})
"""Arguments of timm.create_model with which networks take images of any size: for most networks, ViTs, and Swin."""

Arguments = tuple[tuple[str, Any], ...]


class Layout(NamedTuple):
    """How to create a timm network, and the feature maps that it then has."""

    arguments: Arguments  # of timm.create_model
    multiple: int  # height and width of an image are padded to a multiple of it
    strides: tuple[int | None, ...]  # per feature map; None if its size is not the image size / stride
    channels: tuple[int, ...]  # per feature map
    is_nhwc: bool  # whether feature maps are (N, H, W, C)
    blocks: tuple[int, ...] = ()  # of a plain ViT: the blocks whose output is taken
    unused: frozenset[str] = frozenset()  # parameters that no feature map depends on, such as those for the classifier

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices of the feature maps of stride 4 or coarser, one per stage."""
        return tuple(index for index, stride in enumerate(self.strides) if stride is not None and stride >= FINE_STRIDE)

    @property
    def level_strides(self) -> tuple[int, ...]:
        """Strides of the levels."""
        return tuple(self.strides[index] or 0 for index in self.levels)

    @property
    def necks(self) -> tuple[NeckName, ...]:
        """Necks that can follow the network."""
        strides = self.level_strides
        jpu: tuple[NeckName, ...] = ("jpu",) if set(PYRAMID_STRIDES) <= set(strides) else ()
        return ("resize", *jpu, *(("sfp",) if self.blocks else ()))


def layout(name: str, output_stride: int | None, stages: int | None = None) -> Layout:
    """Return the layout of a network whose last feature map has a stride, or raise an error with the alternatives.

    Args:
        name: name of the timm model.
        output_stride: stride of the last feature map; None for the network as it is, without dilation.
        stages: number of stages to build; None for all.
    """
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "caaseg models lists names"
        raise CaasegError(f"backbone {name!r} is not a timm model; {hint}")
    found = _find_layout(name, output_stride, stages)
    if isinstance(found, Layout):
        return found
    if stages is not None and isinstance(_find_layout(name, output_stride, None), Layout):
        _out_indices(name, stages)  # raises a more specific error
    own = _find_layout(name, None, stages)
    if isinstance(own, str):
        raise CaasegError(f"backbone {name} cannot be used: {own}; use another backbone, caaseg models lists them")
    supported = ", ".join(map(str, supported_strides(name, stages))) or "none of 8, 16 and 32"
    backbone = f"backbone {name}" if stages is None else f"backbone {name} with stages={stages}"
    strides = ", ".join(map(str, dict.fromkeys(own.level_strides)))
    hint = f"; or use neck {' or '.join(own.necks)}, for its features of stride {strides}" if stages is None else ""
    raise CaasegError(f"{backbone} does not support output stride {output_stride}; it supports {supported}{hint}")


def supported_strides(name: str, stages: int | None = None) -> list[int]:
    """Return the output strides that a network has without a neck."""
    return [stride for stride in OUTPUT_STRIDES if isinstance(_find_layout(name, stride, stages), Layout)]


def describe(name: str) -> dict[str, Any]:
    """Return strides, necks, parameters and weights of a timm model as JSON values; `reason` if it cannot be used."""
    found = _find_layout(name, None, None)
    usable = isinstance(found, Layout)
    tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    return {
        "name": name,
        "parameters": sum(weight.numel() for weight in network_on_meta(name, None).parameters()) if usable else None,
        "strides": list(dict.fromkeys(found.level_strides)) if isinstance(found, Layout) else [],
        "output_strides": supported_strides(name) if usable else [],
        "necks": list(found.necks) if isinstance(found, Layout) else [],
        "reason": found if isinstance(found, str) else None,
        "weights": [weights_of(tag, getattr(timm.get_pretrained_cfg(tag), "license", None)) for tag in tags],
    }


def model_names(pattern: str) -> list[str]:
    """Return the names of timm models without tags that match a pattern or contain it."""
    name = pattern.partition(".")[0]
    names: list[str] = timm.list_models(name if {"*", "?"} & set(name) else f"*{name}*")
    return [name] if name in names else names


def _find_layout(name: str, output_stride: int | None, stages: int | None) -> Layout | str:
    """Return the layout with a stride, or the reason why there is none."""
    dilated = () if output_stride in (None, max(OUTPUT_STRIDES)) else ({"output_stride": output_stride},)
    reasons = []
    for arguments in (*dilated, *ANY_SIZE):
        found = _measure(name, tuple(arguments.items()), stages)
        if isinstance(found, Layout) and output_stride in (None, found.strides[-1]):
            return found
        reasons.append(found if isinstance(found, str) else f"its output stride is {found.strides[-1]}")
    return reasons[len(dilated)]


@cache
def _measure(name: str, arguments: Arguments, stages: int | None) -> Layout | str:
    """Return the layout of a network that is created with these arguments, or the reason why it has none."""
    try:
        net = _build_on_meta(name, arguments, stages)
    except Exception as error:  # models raise many types for arguments that they do not support
        return _first_line(error)
    own_side = net.pretrained_cfg["input_size"][-1]
    declared: list[int] = net.feature_info.reduction()
    reason, best, most = "", None, 0
    for multiple in (1, max(declared), own_side):
        size = PROBE if multiple == 1 else (2 * multiple, 3 * multiple)
        try:
            shapes = _shapes(net, size)
            _shapes(net, (multiple, multiple))  # the smallest image
        except Exception:  # models raise many types for sizes that they do not support
            continue
        strides = tuple(_stride(shape[1:], size, stated) for shape, stated in zip(shapes, declared, strict=True))
        if [shape[0] for shape in shapes] != net.feature_info.channels() or strides[-1] is None:
            listed = ", ".join(f"{height} x {width}" for _, height, width in shapes)
            reason = (
                f"an image of {size[0]} x {size[1]} pixels has feature maps of {listed}, which do not fit any stride"
            )
            continue
        needed = [stride for stride, stated in zip(strides, declared, strict=True) if stated >= FINE_STRIDE]
        usable = len(needed) - needed.count(None)
        if usable > most:
            best, most = (multiple, strides), usable
        if usable == len(needed):
            break
    if best is None:
        return reason or _why_not_any_size(net, own_side)
    multiple, strides = best
    found = Layout(arguments, multiple, strides, tuple(net.feature_info.channels()), _is_nhwc(net))
    if not isinstance(net, FeatureGetterNet):
        return found
    if stages is None and len(set(strides)) == 1:  # a plain ViT: feature maps after each quarter of its blocks
        depth = len(net.feature_info)
        blocks = tuple(sorted({max(1, depth * part // NUM_LEVELS) - 1 for part in range(1, NUM_LEVELS + 1)}))
        number = len(blocks)
        found = found._replace(blocks=blocks, strides=strides[-1:] * number, channels=found.channels[-1:] * number)
    return found._replace(unused=_unused_parameters(_build_on_meta(name, arguments, stages, found.blocks), size))


def _unused_parameters(net: Any, size: Sequence[int]) -> frozenset[str]:
    """Return the names of the parameters that get no gradient."""
    with torch.device("meta"), torch.enable_grad():
        maps = net(torch.empty(1, 3, *size))
        torch.stack([one.sum() for one in maps]).sum().backward()  # type: ignore[no-untyped-call]
    unused = frozenset(name for name, parameter in net.named_parameters() if parameter.grad is None)
    net.zero_grad()
    return unused


def _stride(shape: Sequence[int], size: Sequence[int], declared: int) -> int | None:
    """Return the stride of a feature map with this height and width, or None if no stride fits the image size.

    A side of the map must be the side of the image divided by the stride, rounded up.
    """
    for stride in (declared, 1, 2, 4, 8, 16, 32, 64):
        exact = size == PROBE or all(side % stride == 0 for side in size)
        if exact and all(-(-side // stride) == cells for side, cells in zip(size, shape, strict=True)):
            return stride
    return None


def _shapes(net: Any, size: Sequence[int]) -> list[torch.Size]:
    """Return the shapes (C, H, W) of the feature maps of an image."""
    with torch.device("meta"), torch.no_grad():
        maps = net(torch.empty(1, 3, *size))
    return [nchw(one, is_nhwc=_is_nhwc(net)).shape[1:] for one in maps]


def _why_not_any_size(net: Any, own_side: int) -> str:
    """Return why a network did not run on images of other sizes: it takes a single size, or it failed."""
    try:
        _shapes(net, (own_side, own_side))
    except Exception as error:
        return _first_line(error)
    return f"it takes images of {own_side} x {own_side} pixels only"


def _is_nhwc(net: Any) -> bool:
    return getattr(net, "output_fmt", "NCHW") == "NHWC"


def nchw(features: Tensor, *, is_nhwc: bool) -> Tensor:
    """Return a feature map as (N, C, H, W)."""
    return features.permute(0, 3, 1, 2) if is_nhwc else features


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") or type(error).__name__


def create_network(name: str, found: Layout, stages: int | None, *, drop_path: float = 0.0, **options: Any) -> Any:
    """Create a network with weights: random, or those of the hub with `pretrained`."""
    if drop_path:
        options["drop_path_rate"] = drop_path
    try:
        net = _build(name, found.arguments, stages, found.blocks, **options)
    except Exception as error:
        if drop_path and isinstance(error, TypeError):
            raise _no_drop_path(name) from error
        if not options.get("pretrained"):
            raise
        raise CaasegError(
            f"backbone {name}: its ImageNet weights could not be downloaded from the hub ({_first_line(error)}); use "
            "pretrained=False, or a file that you have: pretrained=PATH, in timm or torchvision naming"
        ) from error
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(key not in found.unused)  # distributed training expects gradients of all others
    drops = [module for module in net.modules() if isinstance(module, DropPath)]
    if drop_path and not any(module.drop_prob for module in drops):
        raise _no_drop_path(name)
    for module in () if drop_path else drops:
        module.drop_prob = 0.0  # Swin and others have another default
    return net


def _no_drop_path(name: str) -> CaasegError:
    return CaasegError(f"backbone {name} does not support drop_path; leave it out, or use another backbone")


def _build(name: str, arguments: Arguments, stages: int | None, blocks: Sequence[int] = (), **options: Any) -> Any:
    """Return the timm model up to a stage, or with the output of these blocks."""
    if blocks:
        whole: Any = timm.create_model(name, num_classes=0, **dict(arguments), **options)
        has_norm = isinstance(getattr(whole, "norm", None), nn.Module)  # published features are normalized
        plain: Any = FeatureGetterNet(whole, out_indices=tuple(blocks), norm=has_norm)
        plain.pretrained_cfg = whole.pretrained_cfg
        return plain
    if stages is not None:
        options["out_indices"] = _out_indices(name, stages)
    net: Any = timm.create_model(name, features_only=True, **dict(arguments), **options)
    if stages is not None and isinstance(net, EfficientNetFeatures | MobileNetV3Features):
        used = net.feature_info.get_dicts()[-1]["stage"]
        net.blocks = nn.Sequential(*list(net.blocks)[:used])  # timm would compute the later blocks too
    return net


@lru_cache(maxsize=32)
def _build_on_meta(name: str, arguments: Arguments, stages: int | None, blocks: tuple[int, ...] = ()) -> Any:
    with torch.device("meta"):
        return _build(name, arguments, stages, blocks).eval()


def network_on_meta(name: str, output_stride: int | None, stages: int | None = None) -> Any:
    """Return the network on the meta device. It is shared between calls: do not change it."""
    found = layout(name, output_stride, stages)
    return _build_on_meta(name, found.arguments, stages, found.blocks)


@lru_cache(maxsize=32)
def classifier_on_meta(name: str) -> Any:
    """Return the timm model with its classifier on the meta device. It is shared between calls: do not change it."""
    with torch.device("meta"):
        return create_classifier(name)


def create_classifier(name: str, *, pretrained: bool = False) -> Any:
    """Return the timm model with its classifier."""
    return timm.create_model(name, pretrained=pretrained)


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


def name_in_network(name: str, ours: Mapping[str, Any]) -> str:
    """Return the name that a tensor of a timm model has in its feature network, or the same name if it has none.

    Some feature networks write blocks.3.x as blocks_3.x, and some wrap the model in another module.
    """
    candidates = (name, name.replace(".", "_", 1), f"model.{name}", f"body.{name}")
    return next((candidate for candidate in candidates if candidate in ours), name)


def convert_weights(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights from the naming of a network's authors, such as DINOv2's, to timm's naming if timm can do so."""
    whole = classifier_on_meta(name)
    convert = getattr(sys.modules[type(whole).__module__], "checkpoint_filter_fn", None)
    try:
        return dict(tensors) if convert is None else convert(dict(tensors), whole)
    except Exception:  # timm raises many types for weights of another network
        return dict(tensors)
