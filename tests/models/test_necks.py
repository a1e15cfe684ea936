"""The JPU neck joins strides 8, 16 and 32 at stride 8."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, cat, nn
from torch.nn.functional import conv2d

import caaseg
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone
from caaseg.models.necks import JPU
from caaseg.models.resize import resize
from tests.small_models import small_model


def test_jpu_equals_its_definition() -> None:
    torch.manual_seed(0)
    neck: Any = JPU([3, 4, 5], width=6).eval()
    levels = [torch.randn(2, 3, 9, 11), torch.randn(2, 4, 5, 6), torch.randn(2, 5, 3, 3)]

    def normalized(norm: Any, features: Tensor) -> Tensor:
        weight, bias = (values.view(1, -1, 1, 1) for values in (norm.weight, norm.bias))
        scaled: Tensor = features / (1 + 1e-3) ** 0.5 * weight + bias
        return scaled

    joined = cat(
        [
            resize(normalized(entry[1], conv2d(level, entry[0].weight, padding=1)).relu(), (9, 11))
            for entry, level in zip(neck.entries, levels, strict=True)
        ],
        dim=1,
    )  # (N, 18, 9, 11)
    outputs = []
    for rate, branch in zip((1, 2, 4, 8), neck.branches, strict=True):
        depthwise, norm, pointwise = branch
        spread = conv2d(joined, depthwise.weight, depthwise.bias, padding=rate, dilation=rate, groups=18)
        outputs.append(normalized(pointwise[1], conv2d(normalized(norm, spread), pointwise[0].weight)).relu())
    torch.testing.assert_close(neck(levels), cat(outputs, dim=1), rtol=1e-4, atol=1e-5)
    assert neck.out_channels == 24


@pytest.mark.parametrize("backbone", ["test_resnet", "convnext_atto"])
def test_a_model_with_jpu_predicts_at_stride_8_without_dilation(backbone: str) -> None:
    model = small_model(backbone=backbone, neck="jpu", output_stride=8, aux=True, decoder=True)
    assert isinstance(model.backbone, TimmBackbone)
    assert all(conv.dilation == (1, 1) for conv in model.backbone.net.modules() if isinstance(conv, nn.Conv2d))
    images = torch.randn(2, 3, 64, 96)
    assert model.features(images).coarse.shape == (2, 64, 8, 12)
    prediction = model(images)
    assert prediction.logits.shape == (2, 5, 64, 96)
    assert prediction.aux is not None
    (prediction.logits.sum() + prediction.aux.sum()).backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_stride": 16}, "output_stride is 16, but neck jpu gives 8; use 8"),
        ({"multi_grid": (1, 2)}, "multi_grid is (1, 2), but neck jpu does not support it; omit it"),
        ({"resnet_variant": "authors"}, "resnet_variant is authors, but neck jpu does not support it; omit it"),
        ({"backbone": nn.Identity()}, "has no attribute coarse_channels"),
    ],
)
def test_settings_that_do_not_fit_the_neck_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaasegError, match=re.escape(message)):
        caaseg.create_model("fcn", **{"num_classes": 5, "output_stride": 8, "neck": "jpu", **options})
