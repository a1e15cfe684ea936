"""Resizing in the kernel equals torch's bilinear interpolation. Without a GPU, in Triton's interpreter."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import interpolate

from caaseg.kernels import replace_torch
from caaseg.models.resize import resize

pytest.importorskip("triton", reason="triton is not installed")

from caaseg.kernels.common import INTERPRETED, try_kernel
from caaseg.kernels.resize import resize_channels_last

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="no GPU, and triton was imported before TRITON_INTERPRET=1 was set",
)

DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [((3, 4), (9, 13)), ((5, 5), (33, 40)), ((7, 6), (3, 2)), ((1, 1), (4, 5)), ((5, 6), (1, 1)), ((4, 4), (4, 4))]


@pytest.mark.parametrize(("size", "new_size"), SIZES, ids=str)
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_equal_those_of_torch(
    size: Sequence[int], new_size: Sequence[int], align_corners: bool, dtype: torch.dtype
) -> None:
    features = torch.randn(2, 5, *size).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    found = resize_channels_last(features, new_size, align_corners, torch.float32)
    expected = interpolate(features.double(), tuple(new_size), mode="bilinear", align_corners=align_corners)
    # Positions are computed in float32, and differences of neighbors are about 1.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_kernels_run_here() -> None:
    try_kernel(torch.device(DEVICE))
    assert not replace_torch(torch.randn(1, 4, 3, 3).to(memory_format=torch.channels_last))  # never on a CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_the_result_has_the_dtype_and_layout_of_torch(autocast: bool) -> None:
    features = torch.randn(2, 5, 9, 7, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = resize(features, (33, 25))
        expected = interpolate(features, (33, 25), mode="bilinear", align_corners=True)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
