"""Replacement of batch normalization, residual addition and ReLU in a model by the fused GPU operator."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caaseg.kernels import DTYPES, HAS_TRITON, is_supported
from caaseg.models.max_pool import fuse_max_pool
from caaseg.models.timm_networks import BasicBlock, Bottleneck, FeatureDictNet


def fuse_batch_norm(model: nn.Module) -> None:
    """Replace batch normalization and max pooling by fused operators for training on a GPU; weights keep their names.

    The model still uses torch's own operators on a CPU, under torch.compile, or for feature maps that are not channels
    last in memory, and torch's batch normalization in evaluation mode. Synchronized batch normalization stays
    synchronized: its kernels exchange sums between their passes.
    """
    for parent in list(model.modules()):
        if type(parent) in (BasicBlock, Bottleneck):
            _fuse_block(parent)
        elif isinstance(parent, nn.Sequential | FeatureDictNet):
            children = list(parent.named_children())
            for (_, norm), (name, activation) in pairwise(children):
                if type(norm) in PLAIN and type(activation) is nn.ReLU:
                    convert_batch_norm(norm, relu=True)
                    setattr(parent, name, nn.Identity())
            if children and type(children[-1][1]) in PLAIN:  # batch norm at the end of a shortcut
                convert_batch_norm(children[-1][1], relu=False)
    for stage in model.modules():
        is_sequence = type(stage) is nn.Sequential and len(stage) > 0
        if is_sequence and all(isinstance(block, FusedBlock | FusedBottleneck) for block in stage.children()):
            stage.__class__ = FusedStage
    fuse_max_pool(model)


def has_fused_batch_norm(model: nn.Module) -> bool:
    """Return whether `fuse_batch_norm` changed a model."""
    return any(isinstance(module, _FusedNorm) for module in model.modules())


def convert_batch_norm(norm: nn.Module, *, relu: bool) -> None:
    """Convert batch normalization to its fused class in place, so that references to it stay valid."""
    norm.__class__ = FusedSyncBatchNorm if isinstance(norm, nn.SyncBatchNorm) else FusedBatchNorm
    norm.relu = relu  # type: ignore[assignment]


class _FusedNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization, followed by an optional residual addition and, if `relu`, ReLU."""

    relu: bool

    def group(self) -> Any:
        """Return the process group that normalizes its batches together, or None."""
        return None

    def forward(self, features: Tensor, residual: Tensor | None = None, duplicate: bool = False) -> Any:
        """Return the result, (N, C, H, W); twice with `duplicate`, for two consumers whose gradients are summed."""
        if self._can_fuse(features, residual):
            from caaseg.kernels.batch_norm import batch_norm

            assert self.num_batches_tracked is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            self.num_batches_tracked.add_(1)
            return batch_norm(
                features, residual, self.weight, self.bias, self.running_mean, self.running_var,
                momentum=float(self.momentum or 0.0), eps=self.eps, relu=self.relu, duplicate=duplicate,
                group=self.group(),
            )  # fmt: skip
        result = super().forward(features)
        if residual is not None:
            result = result + residual
        result = result.relu() if self.relu else result
        return (result, result) if duplicate else result

    def _can_fuse(self, features: Tensor, residual: Tensor | None) -> bool:
        if not (HAS_TRITON and self.training) or torch.compiler.is_compiling():
            return False
        from caaseg.kernels import common

        return (
            self.affine
            and self.running_mean is not None
            and self.momentum is not None
            and (is_supported(features) or (common.INTERPRETED and features.dtype in DTYPES))
            and features.is_contiguous(memory_format=torch.channels_last)
            and (residual is None or (residual.dtype == features.dtype and residual.shape == features.shape))
            and features.numel() > features.shape[1]  # torch raises an error for a single pixel
        )


class FusedBatchNorm(_FusedNorm, nn.BatchNorm2d):
    """Fused batch normalization over the batch of this process."""


class FusedSyncBatchNorm(_FusedNorm, nn.SyncBatchNorm):
    """Fused batch normalization over the batches of all processes, which must have the same size."""

    def group(self) -> Any:
        is_distributed = dist.is_available() and dist.is_initialized()
        return (self.process_group or dist.group.WORLD) if is_distributed else None


PLAIN = (nn.BatchNorm2d, nn.SyncBatchNorm)
"""Classes that have a fused class; subclasses of other packages may compute something else."""


class FusedBlock(BasicBlock):
    """A basic block whose last normalization adds the shortcut. `residual` is a duplicate of `features`, or None."""

    def forward(self, features: Tensor, residual: Tensor | None = None, duplicate: bool = False) -> Any:
        residual = features if residual is None else residual
        shortcut = residual if self.downsample is None else self.downsample(residual)
        return self.bn2(self.conv2(self.drop_block(self.bn1(self.conv1(features)))), shortcut, duplicate)


class FusedBottleneck(Bottleneck):
    """A bottleneck whose last normalization adds the shortcut. `residual` is a duplicate of `features`, or None."""

    def forward(self, features: Tensor, residual: Tensor | None = None, duplicate: bool = False) -> Any:
        residual = features if residual is None else residual
        shortcut = residual if self.downsample is None else self.downsample(residual)
        inner = self.drop_block(self.bn2(self.conv2(self.bn1(self.conv1(features)))))
        return self.bn3(self.conv3(inner), shortcut, duplicate)


class FusedStage(nn.Sequential):
    """Residual blocks that duplicate their outputs, so that their last kernels sum the gradients of both paths."""

    def forward(self, features: Tensor) -> Tensor:
        *blocks, last = self
        residual = features
        for block in blocks:
            features, residual = block(features, residual, duplicate=True)
        result: Tensor = last(features, residual)
        return result


def _fuse_block(block: Any) -> None:
    """Fuse a residual block that consists of convolutions, batch normalizations, ReLU and dropout only."""
    depth = 2 if isinstance(block, BasicBlock) else 3
    norms = [getattr(block, f"bn{k}") for k in range(1, depth + 1)]
    activations = [getattr(block, f"act{k}") for k in range(1, depth + 1)]
    plain = all(type(norm) in PLAIN for norm in norms) and all(type(act) is nn.ReLU for act in activations)
    others = (block.se, block.drop_path, block.aa)
    if not plain or not all(other is None or isinstance(other, nn.Identity) for other in others):
        return
    if not isinstance(block.drop_block, nn.Identity | nn.Dropout):
        return
    for norm in norms:
        convert_batch_norm(norm, relu=True)
    block.__class__ = FusedBlock if depth == 2 else FusedBottleneck
