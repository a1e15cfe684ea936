"""Image-level features in heads: outputs, gradients and memory layout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from caaseg.config import Architecture
from caaseg.models.heads.base import AttentionHead, ImageBiasedConvolution, mean_over_image


def test_an_image_biased_convolution_equals_the_convolution_of_concatenated_maps() -> None:
    n, c, others, out, h, w = (int(size) for size in torch.randint(2, 9, (6,)))
    convolution = ImageBiasedConvolution(c + others, out, 1).double()
    maps = torch.randn(n, c, h, w, dtype=torch.float64, requires_grad=True)
    image = torch.randn(n, others, 1, 1, dtype=torch.float64, requires_grad=True)
    concatenated = torch.cat([maps, image.expand(-1, -1, h, w)], dim=1)
    expected, found = F.conv2d(concatenated, convolution.weight, convolution.bias), convolution(maps, image)
    torch.testing.assert_close(found, expected)
    cotangent, inputs = torch.randn_like(found), (maps, image, *convolution.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent)
    )


def test_the_mean_over_the_image_and_its_gradients_equal_those_of_torch() -> None:
    features = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(mean_over_image(features), features.mean((2, 3), keepdim=True))
    assert torch.autograd.gradcheck(mean_over_image, features)
    assert torch.autograd.gradgradcheck(mean_over_image, features)


class Layouts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operations that return a map that is neither channels last nor expanded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.maps = 0
        self.others: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.dim() == 4 and min(tensor.shape[2:]) > 3 and tensor.shape[1] > 3:
                self.maps += 1
                if tensor.stride(1) != 1:
                    self.others.append(f"{function} {tuple(tensor.shape)} {tensor.stride()}")
        return result


class IdentityHead(AttentionHead):
    def build_block(self, config: Architecture) -> nn.Module:
        return nn.Identity()


def test_maps_in_a_head_stay_channels_last_forward_and_backward() -> None:
    head = IdentityHead(24, Architecture(channels=16)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    features, cotangent = (
        torch.randn(2, c, 9, 11).contiguous(memory_format=torch.channels_last) for c in (24, head.out_channels)
    )
    features.requires_grad_()
    with Layouts() as layouts:
        head(features).fused.backward(cotangent)
    assert layouts.maps > 10
    assert not layouts.others
    assert features.grad is not None
    assert features.grad.is_contiguous(memory_format=torch.channels_last)
