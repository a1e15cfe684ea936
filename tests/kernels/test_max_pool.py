"""Max pooling in the kernels equals torch's: values, gradients, ties, NaN. Without a GPU, in Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from caaseg.models.max_pool import FusedMaxPool, fuse_max_pool

pytest.importorskip("triton", reason="triton is not installed")

from caaseg.kernels.common import INTERPRETED
from caaseg.kernels.max_pool import max_pool

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="no GPU, and triton was imported before TRITON_INTERPRET=1 was set",
)

DEVICE = "cpu" if INTERPRETED else "cuda"


def channels_last(map_: Tensor) -> Tensor:
    return map_.to(DEVICE).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 16, 8, 6), (1, 3, 1, 1), (2, 20, 3, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_and_gradients_equal_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    features = channels_last(torch.randint(-3, 4, shape).to(dtype))  # with equal values in a window
    features[:, 0] = -torch.inf  # no value is larger than the initial maximum
    expected_input, found_input = (features.clone().requires_grad_() for _ in range(2))
    expected, found = max_pool2d(expected_input.float(), 3, 2, 1), max_pool(found_input)
    assert torch.equal(found.float(), expected)
    grad = channels_last(torch.randint(-8, 9, expected.shape).to(dtype))  # integers, whose sums are exact
    found.backward(grad)  # type: ignore[no-untyped-call]
    expected.backward(grad.float())  # type: ignore[no-untyped-call]
    assert torch.equal(found_input.grad, expected_input.grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(max_pool(features), found)


def test_nan_propagates() -> None:
    features = channels_last(torch.randn(1, 2, 5, 5))
    features[0, 0, 2, 2] = torch.nan
    assert torch.equal(max_pool(features).isnan(), max_pool2d(features, 3, 2, 1).isnan())


def test_only_pooling_with_the_same_settings_is_converted() -> None:
    same, other = nn.MaxPool2d(3, 2, 1), [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True)]
    model = nn.Sequential(same, *other)
    fuse_max_pool(model)
    assert [type(part) for part in model] == [FusedMaxPool, nn.MaxPool2d, nn.MaxPool2d]
    features = channels_last(torch.randn(1, 4, 9, 9))
    torch.testing.assert_close(same(features), max_pool2d(features, 3, 2, 1), rtol=0, atol=0)
