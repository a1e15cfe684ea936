"""The ResNet of the paper's code (edwardyehuang/CAA, commit 74a1de8), built from timm's ResNet.

Its stem has three 3x3 convolutions (64, 64, 128). The stride of a stage is in its last block, whose identity shortcut
is average-pooled. Strided layers pad like TensorFlow's SAME: sides of even length at the bottom and right only.
Batch normalization has epsilon 1.001e-5, and images are scaled to -1 to 1.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.config import Dilation
from caaseg.models.dilation import dilate, spatial_convolutions

STEM = {"stem_type": "deep", "stem_width": 64}
"""Options of timm's ResNet."""
BN_EPSILON = 1.001e-5
MEAN = STD = (0.5, 0.5, 0.5)


class SameConvolution(nn.Conv2d):
    """3x3 convolution of stride 2 that pads like TensorFlow's SAME: (N, C, H, W) -> (N, C', ceil(H/2), ceil(W/2))."""

    def forward(self, features: Tensor) -> Tensor:
        return F.conv2d(_pad_same(features, 0.0), self.weight, self.bias, self.stride, groups=self.groups)


class SameMaxPool(nn.MaxPool2d):
    """3x3 max pooling of stride 2 that pads like TensorFlow's SAME."""

    def forward(self, features: Tensor) -> Tensor:
        return F.max_pool2d(_pad_same(features, float("-inf")), 3, stride=2)


def _pad_same(features: Tensor, value: float) -> Tensor:
    """Pad for a 3x3 window of stride 2: one pixel at the bottom and right, at the top and left of odd sides only."""
    height, width = features.shape[2:]
    return F.pad(features, (width % 2, 1, height % 2, 1), value=value)


def to_authors_resnet(net: Any, output_stride: int, dilation: Dilation) -> None:
    """Change a timm ResNet with the authors' stem into the authors' ResNet, in place; weights keep their names.

    Args:
        net: the ResNet, without its classifier.
        output_stride: 8 or 16.
        dilation: "timm" is the approximation of earlier versions, for models that they saved: a block whose stride was
            removed keeps the previous rate, identity shortcuts skip pixels, padding is symmetric, epsilon is 1e-5.
    """
    _move_strides(net, output_stride, dilation)
    if dilation == "timm":
        return
    net.maxpool = SameMaxPool(3, stride=2)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = BN_EPSILON
        elif isinstance(module, nn.Conv2d) and module.stride == (2, 2):
            module.__class__, module.padding = SameConvolution, (0, 0)


def _move_strides(net: Any, output_stride: int, dilation: Dilation) -> None:
    """Move each stage's stride to its last block; dilate instead once the output stride is reached."""
    stride, rate = 4, 1  # after the stem
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        for block in stage:
            nominal = 2 if block is stage[-1] and stage is not net.layer4 else 1
            actual = nominal if stride < output_stride else 1
            new_rate = rate * nominal // actual
            convolutions = spatial_convolutions(block)
            for convolution in convolutions:
                convolution.stride = (1, 1)
                dilate(convolution, rate if dilation == "timm" else new_rate)
            convolutions[0].stride = (actual, actual)
            if block.downsample is not None:
                block.downsample[0].stride = (actual, actual)
            elif actual == 2:
                block.downsample = (
                    nn.MaxPool2d(1, stride=2)
                    if dilation == "timm"
                    else nn.AvgPool2d(2, stride=2, ceil_mode=True, count_include_pad=False)
                )
            stride *= actual
            rate = new_rate
