"""Families of timm backbones: supported or refused with a reason, never at another stride than the requested one."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from caaseg.config import OutputStride
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone
from caaseg.models.export import export_model
from caaseg.models.onnx import OnnxModel
from caaseg.models.saving import load_model
from caaseg.models.timm_networks import layout, supported_strides
from tests.models.families import shallow
from tests.small_models import small_model, with_statistics


class Family(NamedTuple):
    strides: tuple[int, ...] = (4, 8, 16, 32)  # of the levels
    dilated: tuple[int, ...] = (32,)  # output strides without a neck
    necks: tuple[str, ...] = ("resize", "jpu")
    multiple: int = 1  # of the sides of the padded image


PLAIN = Family((16,) * 4, (16,), ("resize", "sfp"), 16)
PLAIN_14 = Family((14,) * 4, (), ("resize", "sfp"), 14)
PADDED = Family(multiple=32)

FAMILIES = {
    "test_resnet": Family(dilated=(8, 16, 32)),
    "test_efficientnet": Family(dilated=(8, 16, 32)),
    "test_convnext": Family(dilated=(8, 16, 32), multiple=32),
    "mobilenetv3_small_050": Family(dilated=(8, 16, 32)),
    "xception41": Family(dilated=(8, 16, 32)),
    "swin_tiny_patch4_window7_224": PADDED,
    "swinv2_tiny_window8_256": PADDED,
    "hgnetv2_b0": Family(),
    "caformer_s18": PADDED,
    "convformer_s18": PADDED,
    "inception_next_atto": PADDED,
    "test_vit": PLAIN,
    "vit_tiny_patch16_224": PLAIN,
    "vit_small_patch14_dinov2": PLAIN_14,
    "vit_small_patch14_reg4_dinov2": PLAIN_14,
    "vit_tiny_patch16_dinov3_qkvb": PLAIN,
    "eva02_tiny_patch14_224": PLAIN_14,
    "samvit_base_patch16_224": PLAIN,
    "test_mambaout": Family(),
    "efficientvit_b0": Family(),
    "fastvit_t8": Family(),
    "repvit_m0_9": Family(),
    "pvt_v2_b0": PADDED,
    "maxvit_pico_rw_256": Family(multiple=256),
    "davit_tiny": Family(),
    "hrnet_w18_small": PADDED,
    "densenet121": PADDED,
    "xcit_nano_12_p8_224": Family((8,) * 4, (8,), ("resize", "sfp"), 1),
}
REFUSED = {
    "beitv2_base_patch16_224": "it takes images of 224 x 224 pixels only",
    "hiera_tiny_224": "it takes images of 224 x 224 pixels only",
    "gcvit_xxtiny": "it takes images of 224 x 224 pixels only",
    "coatnet_nano_rw_224": "it takes images of 224 x 224 pixels only",
    "inception_v3": "an image of 598 x 897 pixels has feature maps of 296 x 446, 145 x 220, 72 x 109, 35 x 54, 17 x 26",
    "visformer_tiny": "features_only not implemented for Vision Transformer models",
}
SIZE = (67, 91)
FAST = ("test_resnet", "test_convnext", "test_vit", "test_mambaout", "repvit_m0_9")
"""Small members of the three kinds of families: dilated, plain, pyramid. The others take seconds each."""


PARAMETERS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_family_has_the_requested_stride_or_is_refused(name: str) -> None:
    family = FAMILIES[name]
    found = layout(name, None)
    assert (found.level_strides, found.necks, found.multiple) == (family.strides, family.necks, family.multiple)
    assert tuple(supported_strides(name)) == family.dilated
    strides: tuple[OutputStride, ...] = (8, 16, 32)
    with torch.device("meta"):
        for stride in strides:
            if stride in family.dilated:
                coarse = TimmBackbone(name, output_stride=stride).eval()(torch.empty(1, 3, *SIZE)).coarse
                assert coarse.shape[2:] == cells(stride)
                continue
            hint = f"use neck {' or '.join(family.necks)}"
            with pytest.raises(CaasegError, match=rf"does not support output stride {stride}; it supports .*{hint}"):
                TimmBackbone(name, output_stride=stride)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stride", [None, 8])
def test_a_family_that_cannot_be_used_is_refused_with_the_reason(name: str, stride: OutputStride | None) -> None:
    message = f"backbone {name} cannot be used: {REFUSED[name]}"
    with pytest.raises(CaasegError, match=rf"{re.escape(message)}.*; use another backbone, caaseg models lists them"):
        TimmBackbone(name, output_stride=stride)


def cells(stride: int) -> tuple[int, int]:
    """Return the height and width of a feature map."""
    return -(-SIZE[0] // stride), -(-SIZE[1] // stride)


@pytest.mark.parametrize("name", PARAMETERS)
def test_images_of_any_size_have_feature_maps_of_the_right_size_and_train_all_weights(name: str) -> None:
    family = FAMILIES[name]
    model = small_model("fcn", backbone=shallow(name), neck="resize", output_stride=8, bottleneck_channels=8)
    features = model.features(torch.randn(2, 3, *SIZE))
    assert features.coarse.shape == (2, 16, *cells(8))
    assert [tuple(level.shape[2:]) for level in features.levels] == [cells(stride) for stride in family.strides]
    loss: Tensor = model.classify(features).logits.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    without = [key for key, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not without
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    assert frozen < 1000  # a token for the classifier at most
    smallest: Tensor = model.eval()(torch.randn(1, 3, 1, 1)).logits
    assert smallest.shape == (1, 5, 1, 1)
    assert smallest.isfinite().all()


def test_a_token_for_the_classifier_is_frozen() -> None:
    backbone = TimmBackbone(shallow("xcit_nano_12_p8_224"), output_stride=None)
    assert [name for name, weight in backbone.named_parameters() if not weight.requires_grad] == ["net.model.cls_token"]


# Combinations that tests/models/test_round_trip.py does not have.
COMBINATIONS: list[tuple[str, dict[str, Any]]] = [
    ("test_vit", {}),  # position embeddings that are interpolated
    ("test_vit", {"neck": "resize", "output_stride": 8}),
    ("test_resnet", {"neck": "jpu", "output_stride": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), COMBINATIONS)
def test_models_are_saved_loaded_folded_and_exported(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = with_statistics(small_model("fcn", backbone=name, bottleneck_channels=8, **options))
    images = torch.randint(0, 256, (2, 3, *SIZE)).float()
    normalized = (images - torch.tensor(model.backbone.mean).view(3, 1, 1) * 255) / (
        torch.tensor(model.backbone.std).view(3, 1, 1) * 255
    )
    with torch.no_grad():
        expected = model(normalized).logits
        folded = model.for_inference()(normalized).logits
    torch.testing.assert_close(folded, expected, rtol=1e-3, atol=1e-5)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "model")(normalized).logits, expected)
    export_model(model, tmp_path / "model.onnx")  # compares the file with the model at ten random sizes
    torch.testing.assert_close(OnnxModel(tmp_path / "model.onnx")(images), expected, rtol=1e-3, atol=1e-5)
