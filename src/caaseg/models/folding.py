"""Batch norm folding for inference: the same outputs in fewer passes over the features.

In evaluation, batch norm is a factor and an offset per channel, which the preceding convolution can absorb. cuDNN also
fuses the sum with a shortcut, and ReLU, into the convolution.

Forward hooks during one call of the model find which convolution feeds which batch norm and activation. A function that
also reads the output of the convolution, such as a sum, prevents folding, and so does a hook.
"""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.overrides import TorchFunctionMode

from caaseg.models.fused_norm import has_fused_batch_norm
from caaseg.models.max_pool import fuse_max_pool
from caaseg.models.segmenter import Segmenter
from caaseg.models.timm_networks import BasicBlock, Bottleneck

CACHED_WEIGHTS = 2_500_000  # number of weights of a convolution that fit into the caches of a CPU


def fold_batch_norm(model: Segmenter) -> Segmenter:
    """Return a copy of a model for inference only, in evaluation mode, with the same outputs up to rounding."""
    model = (model.rebuild() if has_fused_batch_norm(model) else copy.deepcopy(model)).eval()
    if has_fused_batch_norm(model):  # in a user-defined backbone module, which cannot be rebuilt
        return model
    for block in model.modules():
        if isinstance(block, BasicBlock | Bottleneck) and isinstance(block.drop_block, nn.Dropout):
            block.drop_block = nn.Identity()  # dropout is for training only
    names = {module: name for name, module in model.named_modules()}
    for convolution, norm, activation in _chains(model):
        fused = fuse_conv_bn_eval(convolution, norm)
        fused.requires_grad_(False)
        _replace(model, names[convolution], fused if activation is None else ReLUConvolution(fused))
        _replace(model, names[norm], _activation_of(norm))
        if activation is not None:
            _replace(model, names[activation], nn.Identity())
    for name, block in list(model.named_modules()):
        if (plain := _as_plain_block(block)) is not None:
            _replace(model, name, plain)
    fuse_max_pool(model)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


_FOLDED: WeakKeyDictionary[Segmenter, tuple[Any, Segmenter]] = WeakKeyDictionary()


def folded(model: Segmenter) -> Segmenter:
    """Return the result of `fold_batch_norm`, cached until a weight of the model changes."""
    key = _weights_key(model)
    known = _FOLDED.get(model)
    if known is None or known[0] != key:
        known = _FOLDED[model] = key, fold_batch_norm(model)
    return known[1]


def _weights_key(model: nn.Module) -> Any:
    """Return a value that changes with the weights: addresses, counts of in-place changes, and one element of each.

    Changes through `weight.data` do not change the counts; the elements detect them.
    """
    tensors = [tensor for tensor in model.state_dict(keep_vars=True).values() if tensor.numel()]
    with torch.inference_mode():
        elements = torch.stack([tensor.reshape(-1)[-1].double() for tensor in tensors])
    return [
        (tensor.data_ptr(), None if tensor.is_inference() else tensor._version, element)
        for tensor, element in zip(tensors, elements.tolist(), strict=True)
    ]


def compile_for_inference(model: Segmenter) -> None:
    """Compile a folded model in place, for each of the first few image sizes it is called with.

    That takes about half a minute per size; further sizes run eagerly. On a CPU the weights become constants in the
    layout that is fastest: do not change them afterwards. On a GPU only the part after the backbone is compiled: a
    folded backbone consists of cuDNN calls already, and torch 2.11 did not finish compiling a ResNet-101 of them.
    """
    if next(model.parameters()).device.type == "cpu":
        model.compile(dynamic=False, options={"freezing": True})
    else:
        model.classify = torch.compile(model.classify, dynamic=False)  # type: ignore[method-assign]


class ReLUConvolution(nn.Module):
    """Convolution, optional sum with another feature map, and ReLU."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        assert not isinstance(convolution.padding, str)
        assert convolution.bias is not None
        self.weight, self.bias = convolution.weight, convolution.bias
        self.geometry = Geometry(
            list(convolution.stride), list(convolution.padding), list(convolution.dilation), convolution.groups
        )
        self._narrow: tuple[Tensor, Tensor] | None = None  # cached weight and bias in 16 bits

    def forward(self, features: Tensor, added: Tensor | None = None) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else features.dtype
        if not (features.is_cuda and torch.version.cuda and dtype in (torch.float16, torch.bfloat16)):
            result = _convolve(features, self.weight, self.bias, self.geometry)
            return (result if added is None else result.add_(added)).relu_()
        weight, bias = self._weights_in(dtype)
        run = _operator if torch.compiler.is_compiling() else _on_gpu
        return run(features.to(dtype), weight, bias, None if added is None else added.to(dtype), *self.geometry)

    def _weights_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weights in 16 bits, converted once instead of in every call."""
        if torch.compiler.is_compiling():
            return self.weight.to(dtype), self.bias.to(dtype)
        cached = self._narrow
        if cached is None or cached[0].dtype != dtype or cached[0].device != self.weight.device:
            cached = self._narrow = self.weight.to(dtype), self.bias.to(dtype)
        return cached


def _convolve(features: Tensor, weight: Tensor, bias: Tensor, geometry: "Geometry") -> Tensor:
    """Convolve. On a CPU, if the weights exceed the caches, compute a part of the output channels at a time.

    The 3 x 3 convolution from 2048 to 512 channels at the entry of heads took 352 instead of 412 ms on two cores.
    """
    pieces = -(-weight.numel() // CACHED_WEIGHTS)
    if features.is_cuda or pieces == 1 or geometry.groups > 1:
        return F.conv2d(features, weight, bias, *geometry)
    parts = zip(weight.chunk(pieces), bias.chunk(pieces), strict=True)
    return torch.cat([F.conv2d(features, kernels, biases, *geometry) for kernels, biases in parts], dim=1)


class Geometry(NamedTuple):
    """Stride, padding, dilation and groups of a convolution."""

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
    """Compute relu(convolution + bias + added) in one kernel."""
    if added is None:
        return torch.cudnn_convolution_relu(features, weight, bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(features, weight, added, 1.0, bias, stride, padding, dilation, groups)


# Registered as an operator for torch.compile, with a shape function.
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
    """A residual block of a ResNet: a sequence of convolutions, the last convolution fused with the sum."""

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
    """Return a folded residual block as a PlainBlock; None for other modules, and for blocks with further layers."""
    if type(block) not in (BasicBlock, Bottleneck) or any(_has_hooks(part) for part in block.modules()):
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
    """Add the bias of the shortcut's convolution to the bias of the last convolution, which saves an addition."""
    parts = [] if shortcut is None else [part for part in shortcut.modules() if not list(part.children())]
    parts = [part for part in parts if not isinstance(part, nn.Identity)]
    if parts and isinstance(parts[-1], nn.Conv2d) and parts[-1].bias is not None and last.bias is not None:
        last.bias.add_(parts[-1].bias)
        parts[-1].bias = None


class _Output(NamedTuple):
    module: nn.Module
    output: Tensor  # referenced, so that its id is not reused
    version: int  # incremented by in-place changes


class _CountReads(TorchFunctionMode):
    """Counts the functions that compute a tensor from the output of a module, also the functions that modules call."""

    def __init__(self, outputs: dict[int, _Output]) -> None:
        super().__init__()
        self.outputs = outputs
        self.reads: Counter[nn.Module] = Counter()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for one in (*args, *(kwargs or {}).values()) for each in _as_sequence(one)]
        sources = [self.outputs[id(tensor)] for tensor in given if id(tensor) in self.outputs]
        unchanged = {source.module for source in sources if source.version == source.output._version}
        result = func(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) for one in _as_sequence(result)):  # the shape of a tensor can be read
            self.reads.update(unchanged)
        return result


def _as_sequence(value: Any) -> tuple[Any, ...] | list[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _chains(model: Segmenter) -> list[tuple[nn.Conv2d, nn.BatchNorm2d, nn.ReLU | None]]:
    """Return the convolutions whose output only a batch norm reads, with this batch norm and the ReLU after it."""
    outputs: dict[int, _Output] = {}  # by id of the output
    readers: dict[nn.Module, list[nn.Module]] = {}  # modules that read the output of a module
    calls: dict[nn.Module, int] = {}

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, nn.Identity):
            return
        source = outputs.get(id(inputs[0])) if inputs else None
        if source is not None and source.version == _version(module, inputs[0]):
            readers.setdefault(source.module, []).append(module)
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            outputs[id(output)] = _Output(module, output, output._version)

    leaves = [module for module in model.modules() if not list(module.children()) or isinstance(module, nn.BatchNorm2d)]
    hooks = [module.register_forward_hook(after) for module in leaves]
    counter = _CountReads(outputs)
    try:
        with torch.no_grad(), counter:
            parameter = next(model.parameters())
            model.coarse(torch.zeros(1, 3, 64, 64, device=parameter.device, dtype=parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()

    def only_reader(module: nn.Module) -> nn.Module | None:
        found = readers.get(module, [])
        is_only = len(found) == counter.reads[module] == 1 and calls[module] == calls[found[0]] == 1
        return found[0] if is_only and not _has_hooks(module) and not _has_hooks(found[0]) else None

    chains = []
    for convolution in [module for module in readers if isinstance(module, nn.Conv2d)]:
        norm = only_reader(convolution)
        if isinstance(norm, nn.BatchNorm2d):
            activation = only_reader(norm) if type(convolution) is nn.Conv2d else None
            # An in-place ReLU: no other module can have read the tensor before it.
            if not (isinstance(activation, nn.ReLU) and activation.inplace and convolution.padding_mode == "zeros"):
                activation = None
            chains.append((convolution, norm, activation))
    return chains


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks read the inputs or outputs of a module, as in some feature networks of timm."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _version(module: nn.Module, features: Tensor) -> int:
    """Return the version that the input of a module had before the module changed it in place."""
    is_in_place = isinstance(module, nn.ReLU) and module.inplace
    return features._version - is_in_place


def _activation_of(norm: nn.BatchNorm2d) -> nn.Module:
    """Return the activation inside timm's batch norm layers, or an identity."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) else nn.Identity()


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
