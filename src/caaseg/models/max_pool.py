"""Replacement of max pooling in a model by the GPU kernels of `caaseg.kernels.max_pool`."""

from torch import Tensor, nn

from caaseg.kernels import replace_torch


class FusedMaxPool(nn.MaxPool2d):
    """Max pooling of 3 x 3 windows with stride 2 and padding 1. Falls back to torch where the kernels do not apply."""

    def forward(self, features: Tensor) -> Tensor:
        """Pool features: (N, C, H, W) -> (N, C, ceil(H / 2), ceil(W / 2))."""
        if replace_torch(features):
            from caaseg.kernels.max_pool import max_pool

            pooled: Tensor = max_pool(features)
        else:
            pooled = super().forward(features)
        return pooled


def fuse_max_pool(model: nn.Module) -> None:
    """Convert the max pooling layers whose settings the kernels support, in place."""
    for module in model.modules():
        if type(module) is nn.MaxPool2d and _settings(module) == ((3, 3), (2, 2), (1, 1), (1, 1), False, False):
            module.__class__ = FusedMaxPool


def _settings(pool: nn.MaxPool2d) -> tuple[object, ...]:
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    pairs = [(size, size) if isinstance(size, int) else tuple(size) for size in sizes]
    return *pairs, pool.ceil_mode, pool.return_indices
