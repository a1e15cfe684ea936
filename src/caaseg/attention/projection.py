"""Convolution, batch normalization and ReLU, used by all blocks and heads."""

from torch import nn

# The authors use Keras' epsilon; with 1e-5 their published outputs change by 3e-3.
BN_EPSILON = 1e-3


def projection(
    in_channels: int,
    out_channels: int,
    *,
    kernel_size: int = 1,
    dilation: int = 1,
    groups: int = 1,
    kind: type[nn.Conv2d] = nn.Conv2d,
    eps: float = BN_EPSILON,
) -> nn.Sequential:
    """Return a same-size convolution without bias, batch normalization and ReLU; Glorot-uniform, like the authors."""
    if in_channels < 1 or out_channels < 1:
        raise ValueError(f"in_channels is {in_channels} and out_channels is {out_channels}; expected at least 1")
    padding = dilation * (kernel_size // 2)
    convolution = kind(
        in_channels, out_channels, kernel_size, padding=padding, dilation=dilation, groups=groups, bias=False
    )
    nn.init.xavier_uniform_(convolution.weight)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels, eps=eps), nn.ReLU(inplace=True))
