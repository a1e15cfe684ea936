"""Parts of the heads nonlocal, ccnet, emanet, ann, encnet and ocr against their definitions."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caaseg.models.heads.ann import AttendedConvolution
from caaseg.models.heads.ccnet import criss_cross_attention
from caaseg.models.heads.emanet import ExpectationMaximizationAttention
from caaseg.models.heads.encnet import Encoding
from tests import processes
from tests.models.bases_process import batch, block, write_bases
from tests.properties import examples
from tests.small_models import small_model


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@examples(10)
@given(height=st.integers(1, 4), width=st.integers(1, 4))
def test_criss_cross_attention_counts_every_pixel_of_column_and_row_once(height: int, width: int) -> None:
    queries, keys, values = normal(2, 3, height, width), normal(2, 3, height, width) + 1, normal(2, 5, height, width)
    expected = torch.empty_like(values)
    for y in range(height):
        for x in range(width):
            cross = [(y, j) for j in range(width)] + [(i, x) for i in range(height) if i != y]
            scores = torch.stack([(queries[:, :, y, x] * keys[:, :, i, j]).sum(1) for i, j in cross], dim=1)
            gathered = torch.stack([values[:, :, i, j] for i, j in cross], dim=1)  # (N, H + W - 1, C)
            expected[:, :, y, x] = (scores.softmax(1).unsqueeze(2) * gathered).sum(1)
    torch.testing.assert_close(criss_cross_attention(queries, keys, values), expected)


def test_an_encoding_sums_the_weighted_differences_from_the_codewords() -> None:
    torch.manual_seed(0)
    encoding, features = Encoding(5, 4).double(), normal(2, 5, 3, 4)
    differences = features.flatten(2).mT.unsqueeze(2) - encoding.codewords  # (N, P, K, C)
    weights = (encoding.scale * differences.square().sum(3)).softmax(2)
    torch.testing.assert_close(encoding(features), (weights.unsqueeze(3) * differences).sum(1))


def test_attended_features_are_projected_and_concatenated_before_their_convolution() -> None:
    features, attended = normal(2, 4, 3, 5), normal(2, 3, 3, 5)
    convolution = AttendedConvolution(4, 6, 3).double()
    convolution.project_weight.data.copy_(normal(4, 3))
    convolution.project_bias.data.copy_(normal(4))
    projected = F.conv2d(attended, convolution.project_weight[:, :, None, None], convolution.project_bias)
    expected = F.conv2d(torch.cat([projected, features], dim=1), convolution.weight)
    torch.testing.assert_close(convolution(features, attended), expected)


def test_bases_are_found_per_image_and_change_only_in_training() -> None:
    attention, pixels = block(), batch()
    initial = attention.bases.clone()
    bases = initial.expand(len(pixels), -1, -1)
    for _ in range(2):
        weights = (pixels @ bases.mT).softmax(2)  # (N, P, K)
        means = (weights / weights.sum(1, keepdim=True)).mT @ pixels
        bases = means / means.norm(dim=2, keepdim=True)
    torch.testing.assert_close(attention.eval().reconstruct(pixels), weights @ bases)
    assert torch.equal(attention.bases, initial)
    attention.train().reconstruct(pixels)
    mean = bases.mean(0)
    expected = 0.9 * initial + 0.1 * mean / mean.norm(dim=1, keepdim=True)
    torch.testing.assert_close(attention.bases, expected)


def test_two_processes_find_the_bases_of_the_whole_batch(tmp_path: Path) -> None:
    assert processes.run_ranks(write_bases, tmp_path) == [0, 0]
    whole = block().train()
    whole.reconstruct(batch())
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"rank{rank}.pt"), whole.bases, rtol=1e-12, atol=1e-14)


def test_the_reconstruction_has_no_gradient() -> None:
    attention = ExpectationMaximizationAttention(6, num_bases=4).double().eval()
    features = normal(2, 6, 3, 4).requires_grad_()
    output = attention(features)
    output.sum().backward()
    assert features.grad is not None
    assert torch.equal(features.grad, (output > 0).double())  # the gradient of the shortcut alone


def test_the_logits_of_regions_are_resized_with_aligned_pixel_centers() -> None:
    head: Any = small_model("ocr").head.double().eval()
    low, high = (
        normal(2, layer[0].in_channels, *size) for layer, size in ((head.region_entry, (4, 6)), (head.entry, (2, 3)))
    )
    found = head([low, high])
    regions = F.interpolate(found.logits["regions"], (2, 3), mode="bilinear", align_corners=False)
    torch.testing.assert_close(found.fused, head.end(head.attend(head.entry(high), regions)).fused)


def test_an_attention_without_iterations_is_refused() -> None:
    with pytest.raises(ValueError, match="iterations is 0; expected 1 or more"):
        ExpectationMaximizationAttention(4, iterations=0)


@pytest.mark.parametrize(("head", "options"), [("ocr", {}), ("ann", {}), ("encnet", {"lateral": True})])
def test_stages_of_different_sizes_are_joined(head: str, options: dict[str, bool]) -> None:
    model = small_model(head, output_stride=32, **options)
    prediction = model.coarse(torch.randn(2, 3, 65, 97))
    assert prediction.logits.shape == (2, 5, 3, 4)
    assert all(logits.shape == (2, 5, 5, 7) for logits in prediction.branches.values())
