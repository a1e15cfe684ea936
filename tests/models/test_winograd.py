"""Winograd's algorithm gives the outputs of the convolution."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn.functional import conv2d

from caaseg.errors import CaasegError
from caaseg.models.export import export_model
from caaseg.models.onnx import OnnxModel
from caaseg.models.winograd import WinogradConvolution, use_winograd
from tests.small_models import small_model, with_statistics

sides = st.integers(1, 19)


@given(height=sides, width=sides, dilation=st.integers(1, 4), relu=st.booleans(), seed=st.integers(0, 2**31))
def test_it_equals_the_convolution(height: int, width: int, dilation: int, relu: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight, bias, features, added = (
        torch.randn(shape, generator=rng, dtype=torch.float64)
        for shape in ((3, 2, 3, 3), (3,), (2, 2, height, width), (2, 3, height, width))
    )
    with torch.no_grad():
        found = WinogradConvolution(weight, bias, dilation, relu=relu)(features, added)
    expected = conv2d(features, weight, bias, padding=dilation, dilation=dilation) + added
    torch.testing.assert_close(found, expected.relu() if relu else expected)


def test_only_large_convolutions_of_a_model_are_replaced() -> None:
    model = with_statistics(small_model("fcn", channels=2816))  # 96 x 2816 channels at the entry of the head
    changed, dilation = use_winograd(model)
    assert [name for name, part in changed.named_modules() if isinstance(part, WinogradConvolution)] == ["head.entry.0"]
    assert dilation == 1
    images = torch.randn(2, 3, 50, 90)
    with torch.no_grad():
        torch.testing.assert_close(changed(images).logits, model(images).logits, rtol=1e-4, atol=1e-4)


def test_rounding_errors_are_small_in_float32() -> None:
    model = small_model("fcn", channels=2816).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images.double()).logits
        error = (use_winograd(model)[0](images).logits - exact).abs().max()
    assert error < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(("channels", "groups", "stride"), [(5632, 2, 1), (2816, 1, 2)])
def test_convolutions_in_groups_or_with_a_stride_are_not_replaced(channels: int, groups: int, stride: int) -> None:
    model: Any = small_model("fcn", channels=channels)
    # The number of weights is that of 512 x 512 channels.
    model.head.entry[0] = nn.Conv2d(96, channels, 3, stride, padding=1, bias=False, groups=groups)
    with pytest.raises(CaasegError, match="no 3 x 3 convolution of 512 x 512 channels or more"):
        use_winograd(model)


def test_a_model_without_large_convolutions_is_refused() -> None:
    with pytest.raises(CaasegError, match=r"no 3 x 3 convolution of 512 x 512 channels or more.*leave --winograd out"):
        use_winograd(small_model())


@pytest.mark.slow
def test_an_export_agrees_with_the_model(tmp_path: Path) -> None:
    model = with_statistics(small_model("fcn", channels=2816))
    check = export_model(model, tmp_path / "m.onnx", winograd=True)
    assert check.difference < 1e-3
    exported = OnnxModel(tmp_path / "m.onnx")
    for size in ((1, 1), (8, 200), (129, 70)):
        assert exported(torch.zeros(1, 3, *size)).shape == (1, 5, *size)


@pytest.mark.slow
def test_an_exported_program_with_dilation_takes_any_size() -> None:
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 2, 3, 3, generator=rng), torch.randn(3, generator=rng)
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    layer = WinogradConvolution(weight, bias, 4, relu=True).eval().requires_grad_(False)
    program = torch.export.export(layer, (torch.rand(2, 2, 40, 36),), dynamic_shapes=(sizes,)).module()
    for size in ((2, 65, 33), (3, 48, 97)):
        features = torch.randn(size[0], 2, *size[1:], generator=rng)
        expected = conv2d(features, weight, bias, padding=4, dilation=4).relu()
        torch.testing.assert_close(program(features), expected, rtol=1e-4, atol=1e-4)
