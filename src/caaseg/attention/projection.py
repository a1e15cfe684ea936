"""The unit every block and head is made of: convolution, batch normalization, ReLU."""

from torch import nn

# The authors normalize with Keras' epsilon; 1e-5 moves their published outputs by 3e-3.
BN_EPSILON = 1e-3


def projection(
    in_channels: int, out_channels: int, *, kernel_size: int = 1, kind: type[nn.Conv2d] = nn.Conv2d
) -> nn.Sequential:
    """Same-size convolution without bias, batch normalization and ReLU; Glorot-uniform kernels, as the authors have."""
    if in_channels < 1 or out_channels < 1:
        raise ValueError(f"a projection from {in_channels} to {out_channels} channels; expected 1 or more of both")
    convolution = kind(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
    nn.init.xavier_uniform_(convolution.weight)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels, eps=BN_EPSILON), nn.ReLU(inplace=True))
