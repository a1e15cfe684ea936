"""Batch normalization in training, with the sum and the ReLU behind it, in few passes over the features.

A residual network spends half of its training step on a GPU in these: torch reads and writes the features anew for the
normalization, for the sum with the shortcut and for ReLU, and as often on the way back. Here each pass does all there
is to do: two over what is normalized going forward, two going back.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from caaseg.kernels import HAS_TRITON
from caaseg.models.backbones import BasicBlock, Bottleneck, FeatureDictNet

PROGRAMS = 264  # that add up, two for a multiprocessor of a large GPU
ELEMENTS = 4096  # of a map, that a program has at a time
UNROLL = 4  # tiles that a program which adds up asks for at a time
REPEATS = 8  # tiles of a program that looks at each value once


def fuse_batch_norm(model: nn.Module) -> None:
    """Have a model normalize in few passes while it is trained on a GPU, in place; weights and their names stay.

    In evaluation, on a CPU, compiled, synchronized between GPUs or not channels last it computes as before.
    """
    for parent in list(model.modules()):
        if type(parent) in (BasicBlock, Bottleneck):
            _fuse_block(parent)
        elif isinstance(parent, nn.Sequential | FeatureDictNet):
            children = list(parent.named_children())
            for (_, norm), (name, activation) in pairwise(children):
                if type(norm) is nn.BatchNorm2d and type(activation) is nn.ReLU:
                    _fuse(norm, relu=True)
                    setattr(parent, name, nn.Identity())
            if children and type(children[-1][1]) is nn.BatchNorm2d:  # of a shortcut
                _fuse(children[-1][1], relu=False)
    for stage in model.modules():
        if (
            type(stage) is nn.Sequential
            and len(stage)
            and all(isinstance(b, FusedBlock | FusedBottleneck) for b in stage)
        ):
            stage.__class__ = FusedStage


def has_fused_batch_norm(model: nn.Module) -> bool:
    """Whether a model was changed so."""
    return any(isinstance(module, FusedBatchNorm) for module in model.modules())


class FusedBatchNorm(nn.BatchNorm2d):
    """A batch normalization, the sum with something if that is given, and ReLU where `relu` says so."""

    relu: bool

    def forward(self, features: Tensor, added: Tensor | None = None, twice: bool = False) -> Any:
        """The result; `twice`, two of it, whose gradients are summed on the way back where they are read anyway."""
        if _applies(self, features, added):
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            return _Normalize.apply(features, added, self.weight, self.bias, twice, self)  # type: ignore[no-untyped-call]
        result = super().forward(features)
        if added is not None:
            result = result + added
        result = result.relu() if self.relu else result
        return (result, result) if twice else result


class FusedBlock(BasicBlock):
    """A basic block whose last normalization takes the shortcut in."""

    def forward(self, features: Tensor, beside: Tensor | None = None, twice: bool = False) -> Any:
        beside = features if beside is None else beside
        shortcut = beside if self.downsample is None else self.downsample(beside)
        return self.bn2(self.conv2(self.bn1(self.conv1(features))), shortcut, twice)


class FusedBottleneck(Bottleneck):
    """A bottleneck whose last normalization takes the shortcut in."""

    def forward(self, features: Tensor, beside: Tensor | None = None, twice: bool = False) -> Any:
        beside = features if beside is None else beside
        shortcut = beside if self.downsample is None else self.downsample(beside)
        return self.bn3(self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(features))))), shortcut, twice)


class FusedStage(nn.Sequential):
    """Residual blocks. What one gives goes two ways in the next; its last normalization sums what comes back."""

    def forward(self, features: Tensor) -> Tensor:
        *blocks, last = self
        beside = features
        for block in blocks:
            features, beside = block(features, beside, twice=True)
        result: Tensor = last(features, beside)
        return result


def _fuse(norm: nn.Module, *, relu: bool) -> None:
    norm.__class__ = FusedBatchNorm  # so that what refers to it, and its weights, stay
    norm.relu = relu  # type: ignore[assignment]


def _fuse_block(block: Any) -> None:
    """A residual block that has nothing but convolutions, normalizations and ReLU in it."""
    depth = 2 if isinstance(block, BasicBlock) else 3
    norms = [getattr(block, f"bn{k}") for k in range(1, depth + 1)]
    activations = [getattr(block, f"act{k}") for k in range(1, depth + 1)]
    plain = all(type(norm) is nn.BatchNorm2d for norm in norms) and all(type(act) is nn.ReLU for act in activations)
    others = (block.se, block.drop_path, block.drop_block, block.aa)
    if not plain or not all(other is None or isinstance(other, nn.Identity) for other in others):
        return
    for norm in norms:
        _fuse(norm, relu=True)
    block.__class__ = FusedBlock if depth == 2 else FusedBottleneck


def _applies(norm: FusedBatchNorm, features: Tensor, added: Tensor | None) -> bool:
    if not (HAS_TRITON and norm.training):
        return False
    from caaseg.kernels import launching

    return (
        norm.affine
        and norm.running_mean is not None
        and norm.momentum is not None
        and (features.is_cuda or launching.INTERPRETED)
        and features.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and features.is_contiguous(memory_format=torch.channels_last)
        and (added is None or (added.dtype == features.dtype and added.shape == features.shape))
        and features.numel() > features.shape[1]  # of one pixel there is no deviation: torch says so
        and not torch.compiler.is_compiling()
    )


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        twice: bool,
        norm: FusedBatchNorm,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from caaseg.kernels import batch_norm as kernels

        if added is not None:
            added = added.contiguous(memory_format=torch.channels_last)
        layout = _Layout(features)
        rows, c = layout.rows, layout.channels
        parts, moments = layout.parts(features), features.new_empty(2, c, dtype=torch.float32)
        kernels.moments_kernel[layout.sums_grid](features, parts, rows, c, layout.share, **layout.blocks, unroll=UNROLL)
        kernels.moments_end_kernel[layout.end_grid](
            parts, moments, norm.running_mean, norm.running_var, parts.shape[1], rows, c, layout.share,
            float(norm.momentum or 0.0), norm.eps, **layout.ends,
        )  # fmt: skip
        result = torch.empty_like(features)
        # What ReLU let through of a sum, an eighth or less of the bytes that reading the result again would be.
        signs = layout.signs(features) if norm.relu and added is not None else None
        kernels.normalize_kernel[layout.map_grid](
            features, added, moments, weight, bias, result, signs, rows, c,
            summed=added is not None, relu=norm.relu, **layout.blocks, repeats=REPEATS,
        )  # fmt: skip
        ctx.relu, ctx.summed = norm.relu, added is not None
        ctx.save_for_backward(features, signs, moments, weight, bias)
        return (result, result.detach()) if twice else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from caaseg.kernels import batch_norm as kernels
        from caaseg.kernels.launching import refuse_second_derivatives

        refuse_second_derivatives("use a model without fused normalization")
        features, signs, moments, weight, bias = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        if other is not None:
            other = other.contiguous(memory_format=torch.channels_last)
        layout = _Layout(features)
        rows, c = layout.rows, layout.channels
        parts, sums = layout.parts(features), torch.empty_like(moments)
        # The shortcut's gradient is the incoming one where ReLU let it through; without ReLU there is nothing to write.
        writes = ctx.summed and ctx.relu
        if other is not None and not writes:
            grad, other = grad + other, None
        passed = torch.empty_like(grad) if writes else grad
        kernels.sums_kernel[layout.sums_grid](
            grad, other, features, signs, moments, weight, bias, passed, parts, rows, c, layout.share,
            summed=writes, twice=other is not None, relu=ctx.relu, **layout.blocks, unroll=UNROLL,
        )  # fmt: skip
        kernels.sums_end_kernel[layout.end_grid](parts, sums, parts.shape[1], c, **layout.ends)
        grad_features = torch.empty_like(features)
        kernels.spread_kernel[layout.map_grid](
            passed, features, moments, weight, bias, sums, grad_features, rows, c,
            masked=ctx.relu and not writes, **layout.blocks, repeats=REPEATS,
        )  # fmt: skip
        grad_bias, grad_weight = sums.to(weight.dtype)
        return grad_features, passed if ctx.summed else None, grad_weight, grad_bias, None, None


class _Layout:
    """How a map is cut for programs."""

    def __init__(self, features: Tensor) -> None:
        n, c, height, width = features.shape
        self.rows, self.channels = n * height * width, c
        block_c = min(max(1 << (c - 1).bit_length(), 16), 128)
        block = ELEMENTS // block_c
        across = -(-c // block_c)
        tiles = -(-self.rows // block)
        # An odd number of tiles, so that programs do not all begin at the same place of the memory's rows.
        self.share = (-(-tiles // max(PROGRAMS // across, 1)) | 1) * block  # rows
        self.blocks = {"block": block, "block_c": block_c}
        self.sums_grid = (-(-self.rows // self.share), across)
        self.map_grid = (-(-tiles // REPEATS), across)
        self.end_grid = (-(-c // 16),)
        # Few programs add parts up, so each takes many at a time: a turn waits for the one before.
        many = self.sums_grid[0] > 64
        self.ends = {"block": 256 if many else 64, "block_c": 16, "num_warps": 8 if many else 4}

    def signs(self, features: Tensor) -> Tensor:
        across, block_c = self.map_grid[1], self.blocks["block_c"]
        return torch.empty(across, self.rows, block_c // 8, dtype=torch.uint8, device=features.device)

    def parts(self, features: Tensor) -> Tensor:
        return features.new_empty(2, self.sums_grid[0], self.channels, dtype=torch.float32)
