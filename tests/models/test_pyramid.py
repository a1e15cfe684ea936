"""Heads that read or pool feature maps of several sizes, and their layers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.config import Architecture, OutputStride
from caaseg.errors import CaasegError
from caaseg.models.cuda_graphs import CapturedModel, capture_coarse
from caaseg.models.folding import fold_batch_norm
from caaseg.models.heads import head_class
from caaseg.models.heads.deeplab import DeepLabV3Head
from caaseg.models.heads.fcn import FCNHead
from caaseg.models.heads.pyramid import PyramidConvolution, convolve_resized, pyramid_pooling
from tests.small_models import small_model, with_statistics

JOINED_INPUT = {"num_convs": 2, "concat_input": True}
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("psp", {}),
    ("deeplabv3", {}),
    ("deeplabv3plus", {}),
    ("upernet", {"output_stride": 32}),
    ("segformer", {"output_stride": 32}),
    ("fcn", JOINED_INPUT),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_equal_with_gradients(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent)
    )


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize(
    ("size", "resized"), [((1, 1), (5, 4)), ((3, 4), (6, 8)), ((5, 7), (9, 11)), ((6, 6), (1, 2)), ((4, 3), (4, 3))]
)
def test_the_convolution_of_a_resized_map_equals_its_definition(
    kernel_size: int, size: tuple[int, int], resized: tuple[int, int]
) -> None:
    features, weight = random(2, 3, *size), random(4, 3, kernel_size, kernel_size)
    large = F.interpolate(features, resized, mode="bilinear", align_corners=False)
    expected = F.conv2d(large, weight, padding=kernel_size // 2)
    assert_equal_with_gradients(convolve_resized(features, weight, resized), expected, features, weight)


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 4), (13, 12)])
def test_pyramid_pooling_equals_adaptive_average_pooling(size: tuple[int, int]) -> None:
    features, scales = random(2, 3, *size), (1, 2, 3, 6)
    found = [pooled.flatten(2) for pooled in pyramid_pooling(features, scales)]
    expected = [F.adaptive_avg_pool2d(features, scale).flatten(2) for scale in scales]
    assert_equal_with_gradients(torch.cat(found, dim=2), torch.cat(expected, dim=2), features)


@pytest.mark.parametrize("bias", [False, True])
def test_a_pyramid_convolution_equals_the_convolution_of_concatenated_maps(bias: bool) -> None:
    convolution = PyramidConvolution(2 + 3 + 4 + 2, 6, 3, padding=1, bias=bias).double()
    maps = [random(2, 2, 7, 9), random(2, 3, 7, 9)]
    smaller = [random(2, 4, 4, 5), random(2, 2, 1, 1)]
    resized = [F.interpolate(features, (7, 9), mode="bilinear", align_corners=False) for features in smaller]
    expected = F.conv2d(torch.cat([*maps, *resized], dim=1), convolution.weight, convolution.bias, padding=1)
    assert_equal_with_gradients(convolution(maps, smaller), expected, *maps, *smaller, *convolution.parameters())


def test_autocast_rounds_as_little_as_with_concatenated_maps() -> None:
    convolution = PyramidConvolution(16, 32, 3, padding=1, bias=False)
    features, smaller = torch.randn(2, 8, 17, 17), torch.randn(2, 8, 9, 9)
    resized = F.interpolate(smaller, (17, 17), mode="bilinear", align_corners=False)
    concatenated = torch.cat([features, resized], dim=1)
    expected = F.conv2d(concatenated.double(), convolution.weight.detach().double(), padding=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, plain = convolution([features], [smaller]), F.conv2d(concatenated, convolution.weight, padding=1)
    assert found.dtype == torch.bfloat16
    errors = [float((rounded.double() - expected).norm() / expected.norm()) for rounded in (found, plain)]
    assert errors[0] < 2 * errors[1] < 0.02


def head_and_inputs(name: str, options: dict[str, Any]) -> tuple[nn.Module, list[Tensor]]:
    """Return a head and feature maps for it, both channels last."""
    kind = head_class(name)
    channels = (8, 12, 20, 24)
    read = channels[-1] if kind.levels is None else tuple(channels[index] for index in kind.levels)
    head = kind(read, Architecture(channels=16, **options)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sizes = [(27, 31), (14, 16), (11, 9), (11, 9)]
    indices = (-1,) if kind.levels is None else kind.levels
    maps = [torch.randn(2, channels[k], *sizes[k]).contiguous(memory_format=torch.channels_last) for k in indices]
    return head, [features.requires_grad_() for features in maps]


@pytest.mark.parametrize(("name", "options"), HEADS)
def test_batch_norm_gets_channels_last_maps_forward_and_backward(name: str, options: dict[str, Any]) -> None:
    """The fused operator needs this layout, and copies of maps to another one would take time."""
    head, maps = head_and_inputs(name, options)
    found: list[Tensor] = []

    def record(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        found.append(inputs[0])
        inputs[0].register_hook(found.append)  # type: ignore[no-untyped-call]

    norms = [module for module in head.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.register_forward_hook(record)
    fused = head(maps if head.levels else maps[0]).fused
    fused.backward(torch.randn_like(fused))
    assert len(found) == 2 * len(norms)
    gradients = [features.grad for features in maps]
    for tensor in (*found, fused, *gradients):
        assert tensor.is_contiguous(memory_format=torch.channels_last), tensor.stride()


@pytest.mark.parametrize(("name", "options"), HEADS)
def test_a_folded_head_gives_the_same_outputs(name: str, options: dict[str, Any]) -> None:
    model = with_statistics(small_model(name, aux=True, **options)).double()
    folded, images = fold_batch_norm(model), torch.randn(2, 3, 40, 51, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(folded(images).logits, model(images).logits)
    assert not [module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)]


@needs_gpu
@pytest.mark.parametrize(("name", "options"), HEADS)
def test_replays_of_a_cuda_graph_give_the_outputs_of_the_model(name: str, options: dict[str, Any]) -> None:
    model = small_model(name, **options).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(2, 3, 65, 73, device="cuda").contiguous(memory_format=torch.channels_last)
    step = capture_coarse(model.train(), images, lambda: torch.autocast("cuda", torch.bfloat16))
    step(images).logits.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.head.parameters())
    replayed = CapturedModel(model.eval())
    with torch.inference_mode():
        for _ in range(3):
            found = replayed(images).logits
        torch.testing.assert_close(found, model(images).logits)
    assert all(replayed._captures.values())


def test_an_fcn_with_default_settings_has_the_weights_of_earlier_versions() -> None:
    head = FCNHead(12, Architecture(channels=16))
    assert [name for name, _ in head.named_parameters()] == ["entry.0.weight", "entry.1.weight", "entry.1.bias"]


def test_an_fcn_has_as_many_convolutions_as_configured() -> None:
    def shapes(**settings: Any) -> list[tuple[int, ...]]:
        head = FCNHead(12, Architecture(channels=16, **settings))
        return [tuple(module.weight.shape) for module in head.modules() if isinstance(module, nn.Conv2d)]

    first, further = (16, 12, 3, 3), (16, 16, 3, 3)
    assert shapes(num_convs=3) == [first, further, further]
    assert shapes(concat_input=True) == [first, (16, 28, 3, 3)]


@pytest.mark.parametrize(
    ("output_stride", "rates", "expected"),
    [(8, None, [12, 24, 36]), (16, None, [6, 12, 18]), (32, None, [3, 6, 9]), (16, (2, 5), [2, 5])],
)
def test_dilation_rates_follow_the_output_stride_unless_configured(
    output_stride: OutputStride, rates: tuple[int, ...] | None, expected: list[int]
) -> None:
    head = DeepLabV3Head(12, Architecture(channels=16, output_stride=output_stride, aspp_rates=rates))
    found = [module.dilation[0] for module in head.modules() if isinstance(module, nn.Conv2d)]
    assert [rate for rate in found if rate > 1] == expected


def test_a_backbone_with_too_few_stages_is_refused() -> None:
    with pytest.raises(CaasegError, match="UPerNet reads feature maps of 4 backbone stages, but there are 3; use"):
        small_model("upernet", stages=3)
