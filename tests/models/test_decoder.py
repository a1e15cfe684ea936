"""The simple decoder."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import caaseg
from caaseg.errors import CaasegError
from caaseg.models.backbones import Backbone
from caaseg.models.decoder import SimpleDecoder
from caaseg.models.folding import fold_batch_norm
from caaseg.models.fused_norm import fuse_batch_norm
from tests.small_models import small_model, varied_model


def test_the_features_of_the_head_are_upsampled_bilinearly_with_aligned_corners() -> None:
    decoder = SimpleDecoder(1, 2, channels=4)
    inputs: list[Tensor] = []
    decoder.refine.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    rows, columns = torch.linspace(0, 1, 3)[:, None], torch.linspace(0, 1, 4)
    assert decoder((rows + 2 * columns)[None, None], torch.randn(1, 2, 9, 13)).shape == (1, 4, 9, 13)
    expected = torch.linspace(0, 1, 9)[:, None] + 2 * torch.linspace(0, 1, 13)  # a plane stays a plane
    torch.testing.assert_close(inputs[0][0, 0], expected)


@pytest.mark.parametrize(
    ("backbone", "options", "channels"),
    [
        ("test_resnet", {}, 32),
        ("resnet18", {"stages": 3}, 64),
        ("resnet18", {"resnet_variant": "authors"}, 128),
        ("test_efficientnet", {}, None),
        ("test_resnet", {"neck": "resize"}, 32),
    ],
)
def test_a_decoder_of_stride_2_reads_features_of_stride_2(
    backbone: str, options: dict[str, Any], channels: int | None
) -> None:
    model = small_model(
        backbone=backbone, decoder=True, decoder_stride=2, decoder_channels=8, output_stride=16, **options
    ).eval()
    features = model.features(torch.randn(1, 3, 65, 50))
    assert features.finest is not None
    assert features.finest.shape == (1, model.backbone.finest_channels, 33, 25)
    assert channels in (None, model.backbone.finest_channels)
    assert model.classify(features).logits.shape == (1, 5, 33, 25)


def test_a_decoder_of_stride_2_is_folded_and_loaded_with_the_same_result(tmp_path: Path) -> None:
    model = varied_model(decoder_stride=2, decoder_channels=8)
    images = torch.randn(1, 3, 64, 48)
    expected = model(images).logits
    torch.testing.assert_close(fold_batch_norm(model)(images).logits, expected, rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path)
    assert torch.equal(caaseg.load_model(tmp_path).eval()(images).logits, expected)
    fuse_batch_norm(model)
    torch.testing.assert_close(model(images).logits, expected)


def test_models_without_decoder_stride_have_a_decoder_of_stride_4() -> None:
    model = small_model(decoder=True)
    assert model.config.decoder_stride == 4
    assert model.backbone.finest_channels is None
    assert not [name for name in model.state_dict() if "finest" in name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": False}, "decoder_stride is 2, but decoder is false; set decoder true, or omit decoder_stride"),
        ({"backbone": "test_vit", "neck": "sfp"}, "decoder_stride is 2, but neck sfp has no features of stride 2"),
        (
            {"backbone": "test_convnext", "output_stride": 32},
            "has features of strides [4, 8, 16, 32]; decoder_stride 2 needs stride 2: use decoder_stride=4 or another",
        ),
    ],
)
def test_a_decoder_of_stride_2_without_such_features_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaasegError, match=re.escape(message)):
        small_model(**{"decoder": True, "decoder_stride": 2, **options})


class FineOnly(Backbone):
    """A backbone without features of stride 2."""

    coarse_channels, fine_channels, mean, std = 4, 4, (0.0,), (1.0,)


def test_a_backbone_module_needs_finest_channels_for_a_decoder_of_stride_2() -> None:
    message = re.escape("backbone FineOnly has no features of stride 2 (finest_channels is None)")
    with pytest.raises(CaasegError, match=message):
        small_model(backbone=FineOnly(), decoder=True, decoder_stride=2)
