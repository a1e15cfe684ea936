"""A model for inference alone: the same numbers in fewer passes over the features.

In evaluation a batch normalization is a factor and an addend a channel, and the convolution before it takes both into
its weights. What follows, the sum with a shortcut and ReLU, the GPU's library computes along with the convolution.

Which convolution stands before which normalization and activation is seen by running the model once: the one's output
is the other's input.
"""

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from caaseg.models.fused_norm import has_fused_batch_norm
from caaseg.models.segmenter import Segmenter

CACHED = 2_500_000  # weights of a convolution


def fold_batch_norm(model: Segmenter) -> Segmenter:
    """A copy for inference alone, in evaluation mode; it gives the model's numbers up to rounding."""
    model = _as_built(model) if has_fused_batch_norm(model) else copy.deepcopy(model)
    model.eval()
    names = {module: name for name, module in model.named_modules()}
    for convolution, norm, activation in _chains(model):
        fused = fuse_conv_bn_eval(convolution, norm)
        fused.requires_grad_(False)
        _replace(model, names[convolution], fused if activation is None else ReLUConvolution(fused))
        _replace(model, names[norm], _what_is_left(norm))
        if activation is not None:
            _replace(model, names[activation], nn.Identity())
    for name, block in list(model.named_modules()):
        if (plain := _as_plain_block(block)) is not None:
            _replace(model, name, plain)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _as_built(model: Segmenter) -> Segmenter:
    """A copy of a model whose normalization was fused for training, without that."""
    parameter = next(model.parameters())
    plain = Segmenter(model.config).to(parameter)
    plain.load_state_dict(model.state_dict())
    return plain


def compile_for_inference(model: Segmenter) -> None:
    """Have a folded model compiled, in place, for each of the first few sizes it is called with.

    That takes half a minute or so a size; further sizes run as before. On a CPU the weights become constants, laid out
    as the processor's library likes them best: do not change them. On a GPU it is what follows the backbone: a folded
    backbone is calls of the library already, and torch 2.11 did not come to an end with a ResNet-101 of them.
    """
    if next(model.parameters()).device.type == "cpu":
        model.compile(dynamic=False, options={"freezing": True})
    else:
        model.classified = torch.compile(model.classified, dynamic=False)  # type: ignore[method-assign]


class ReLUConvolution(nn.Module):
    """A convolution, the sum with something if that is given, and ReLU."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        assert not isinstance(convolution.padding, str)
        assert convolution.bias is not None
        self.weight, self.bias = convolution.weight, convolution.bias
        self.geometry = Geometry(
            list(convolution.stride), list(convolution.padding), list(convolution.dilation), convolution.groups
        )
        self._narrow: tuple[Tensor, Tensor] | None = None  # weight and bias in 16 bits, as they were last asked for

    def forward(self, features: Tensor, added: Tensor | None = None) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else features.dtype
        if not (features.is_cuda and torch.version.cuda and dtype in (torch.float16, torch.bfloat16)):
            result = _in_pieces(features, self.weight, self.bias, self.geometry)
            return (result if added is None else result.add_(added)).relu_()
        weight, bias = self._in(dtype)
        run = _operator if torch.compiler.is_compiling() else _on_gpu
        return run(features.to(dtype), weight, bias, None if added is None else added.to(dtype), *self.geometry)

    def _in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The weights, narrowed once instead of in every call."""
        if torch.compiler.is_compiling():
            return self.weight.to(dtype), self.bias.to(dtype)
        known = self._narrow
        if known is None or known[0].dtype != dtype or known[0].device != self.weight.device:
            known = self._narrow = self.weight.to(dtype), self.bias.to(dtype)
        return known


def _in_pieces(features: Tensor, weight: Tensor, bias: Tensor, geometry: "Geometry") -> Tensor:
    """A convolution; on a CPU some output channels at a time where its weights are more than caches hold.

    So the 3 x 3 convolution from 2048 to 512 channels that heads begin with took 352 ms instead of 412, on two cores.
    """
    pieces = -(-weight.numel() // CACHED)
    if features.is_cuda or pieces == 1 or geometry.groups > 1:
        return F.conv2d(features, weight, bias, *geometry)
    parts = zip(weight.chunk(pieces), bias.chunk(pieces), strict=True)
    return torch.cat([F.conv2d(features, kernels, biases, *geometry) for kernels, biases in parts], dim=1)


class Geometry(NamedTuple):
    """How a convolution's kernel moves."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


def _on_gpu(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """relu(convolution + bias + added) in one kernel."""
    if added is None:
        return torch.cudnn_convolution_relu(features, weight, bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(features, weight, added, 1.0, bias, stride, padding, dilation, groups)


# The same as an operator, for torch.compile, which learns the shape of what it gives.
_operator = torch.library.custom_op("caaseg::convolution_relu", _on_gpu, mutates_args=())


@_operator.register_fake
def _shape(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return F.conv2d(features, weight, bias, stride, padding, dilation, groups)


class PlainBlock(nn.Module):
    """A residual block of a ResNet: convolutions one after another, the last with the sum."""

    def __init__(self, convolutions: list[ReLUConvolution], shortcut: nn.Module | None) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        added = features if self.shortcut is None else self.shortcut(features)
        *others, last = self.convolutions
        for convolution in others:
            features = convolution(features)
        result: Tensor = last(features, added)
        return result


def _as_plain_block(block: nn.Module) -> PlainBlock | None:
    """A residual block whose normalizations are folded; None where it is none, or has more in it than convolutions."""
    if type(block) not in (BasicBlock, Bottleneck):
        return None
    parts: Any = block
    depth = 2 if isinstance(block, BasicBlock) else 3
    convolutions = [getattr(parts, f"conv{k}") for k in range(1, depth + 1)]
    between = [getattr(parts, f"bn{k}") for k in range(1, depth + 1)]
    others = [parts.se, parts.drop_path, *between, parts.drop_block, parts.aa]
    if not all(other is None or isinstance(other, nn.Identity) for other in others):
        return None
    *before, last = convolutions
    if type(last) is not nn.Conv2d or not all(isinstance(convolution, ReLUConvolution) for convolution in before):
        return None
    if not isinstance(getattr(parts, f"act{depth}"), nn.ReLU):
        return None
    _take_bias(last, parts.downsample)
    return PlainBlock([*before, ReLUConvolution(last)], parts.downsample)


def _take_bias(last: nn.Conv2d, shortcut: nn.Module | None) -> None:
    """Give the bias of the shortcut's convolution to the one that its result is added to: a pass less."""
    parts = [] if shortcut is None else [part for part in shortcut.modules() if not list(part.children())]
    parts = [part for part in parts if not isinstance(part, nn.Identity)]
    if parts and isinstance(parts[-1], nn.Conv2d) and parts[-1].bias is not None and last.bias is not None:
        last.bias.add_(parts[-1].bias)
        parts[-1].bias = None


class _Seen(NamedTuple):
    module: nn.Module
    output: Tensor  # kept, so that no id is used again
    version: int  # raised by whatever changes it in place


def _chains(model: Segmenter) -> list[tuple[nn.Conv2d, nn.BatchNorm2d, nn.ReLU | None]]:
    """Every convolution whose output goes into a normalization and nowhere else, and the ReLU behind both."""
    made: dict[int, _Seen] = {}  # by the output's id
    read: dict[nn.Module, list[nn.Module]] = {}
    calls: dict[nn.Module, int] = {}

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, nn.Identity):
            return
        maker = made.get(id(inputs[0])) if inputs else None
        if maker is not None and maker.version == _version(module, inputs[0]):
            read.setdefault(maker.module, []).append(module)
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            made[id(output)] = _Seen(module, output, output._version)

    leaves = [module for module in model.modules() if not list(module.children()) or isinstance(module, nn.BatchNorm2d)]
    hooks = [module.register_forward_hook(after) for module in leaves]
    try:
        with torch.no_grad():
            parameter = next(model.parameters())
            model.coarse(torch.zeros(1, 3, 64, 64, device=parameter.device, dtype=parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()

    def only_reader(module: nn.Module) -> nn.Module | None:
        readers = read.get(module, [])
        return readers[0] if len(readers) == 1 and calls[module] == calls[readers[0]] == 1 else None

    found = []
    for convolution in [module for module in read if isinstance(module, nn.Conv2d)]:
        norm = only_reader(convolution)
        if isinstance(norm, nn.BatchNorm2d):
            activation = only_reader(norm) if type(convolution) is nn.Conv2d else None
            # In place, so that nothing else can have read what was there before.
            if not (isinstance(activation, nn.ReLU) and activation.inplace and convolution.padding_mode == "zeros"):
                activation = None
            found.append((convolution, norm, activation))
    return found


def _version(module: nn.Module, given: Tensor) -> int:
    """How often a module's input was changed before it came there."""
    changes_it = isinstance(module, nn.ReLU) and module.inplace
    return given._version - changes_it


def _what_is_left(norm: nn.BatchNorm2d) -> nn.Module:
    """Nothing; timm's layers have an activation in them."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) else nn.Identity()


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
