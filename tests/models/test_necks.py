"""Necks make the features that a head reads from a backbone that is not dilated."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, cat, nn
from torch.nn.functional import conv2d, conv_transpose2d, gelu, layer_norm, max_pool2d

import caaseg
from caaseg.config import Architecture, NeckName, OutputStride
from caaseg.errors import CaasegError
from caaseg.models.backbones import Features, TimmBackbone
from caaseg.models.heads.base import Head, HeadFeatures
from caaseg.models.necks import JPU, Resize, SimpleFeaturePyramid
from caaseg.models.resize import resize
from tests.small_models import small_model

LEVELS = (torch.randn(2, 2, 17, 21), torch.randn(2, 3, 9, 11), torch.randn(2, 4, 5, 6), torch.randn(2, 5, 3, 3))
"""Feature maps of strides 4 to 32 of images of 68 x 84 pixels."""
FEATURES = Features(LEVELS[-1], LEVELS[0], LEVELS)


class LevelsHead(Head):
    """Joins the feature maps of strides 4 and 16."""

    title = "two levels"
    levels = (0, 2)

    def __init__(self, in_channels: tuple[int, ...], config: Architecture) -> None:
        super().__init__()
        self.out_channels = sum(in_channels)

    def forward(self, features: list[Tensor]) -> HeadFeatures:
        return HeadFeatures(cat([resize(one, features[0].shape[2:]) for one in features], dim=1), {})


def normalized(norm: Any, features: Tensor) -> Tensor:
    """Return batch norm with the initial statistics."""
    weight, bias = (values.view(1, -1, 1, 1) for values in (norm.weight, norm.bias))
    scaled: Tensor = features / (1 + 1e-3) ** 0.5 * weight + bias
    return scaled


def test_jpu_equals_its_definition() -> None:
    torch.manual_seed(0)
    neck: Any = JPU([2, 3, 4, 5], [4, 8, 16, 32], width=6, fine_channels=2).eval()
    joined = cat(
        [
            resize(normalized(entry[1], conv2d(level, entry[0].weight, padding=1)).relu(), (9, 11))
            for entry, level in zip(neck.entries, LEVELS[1:], strict=True)
        ],
        dim=1,
    )  # (N, 18, 9, 11)
    outputs = []
    for rate, branch in zip((1, 2, 4, 8), neck.branches, strict=True):
        depthwise, norm, pointwise = branch
        spread = conv2d(joined, depthwise.weight, depthwise.bias, padding=rate, dilation=rate, groups=18)
        outputs.append(normalized(pointwise[1], conv2d(normalized(norm, spread), pointwise[0].weight)).relu())
    found = neck(FEATURES, (68, 84))
    torch.testing.assert_close(found.coarse, cat(outputs, dim=1), rtol=1e-4, atol=1e-5)
    assert found.fine is LEVELS[0]
    assert neck.coarse_channels == 24


@pytest.mark.parametrize(("stride", "size"), [(8, (9, 11)), (16, (5, 6)), (32, (3, 3))])
def test_resize_equals_its_definition(stride: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    neck: Any = Resize([2, 3, 4, 5], stride, width=6, fine_channels=2).eval()
    resized = [
        resize(normalized(project[1], conv2d(level, project[0].weight)).relu(), size)
        for project, level in zip(neck.projections, LEVELS, strict=True)
    ]
    expected = normalized(neck.join[1], conv2d(cat(resized, dim=1), neck.join[0].weight)).relu()
    torch.testing.assert_close(neck(FEATURES, (68, 84)).coarse, expected, rtol=1e-4, atol=1e-5)


def test_sfp_equals_its_definition() -> None:
    torch.manual_seed(0)
    neck: Any = SimpleFeaturePyramid(8, 16, width=6, output_stride=32, read_strides=(4, 8, 16, 32)).eval()
    last = torch.randn(2, 8, 5, 6)  # of a padded image of 80 x 96 pixels

    def norm(features: Tensor) -> Tensor:
        return layer_norm(features.movedim(1, -1), features.shape[1:2], eps=1e-6).movedim(-1, 1)

    def up(layer: Any, features: Tensor) -> Tensor:
        return conv_transpose2d(features, layer.weight, layer.bias, stride=2)

    def project(layers: Any, features: Tensor) -> Tensor:
        return norm(conv2d(norm(conv2d(features, layers[0].weight)), layers[2].weight, padding=1))

    four, eight, sixteen, thirty_two = (neck.maps[str(stride)] for stride in (4, 8, 16, 32))
    expected = (
        project(four[4:], up(four[3], gelu(norm(up(four[0], last)))))[:, :, :17, :21],
        project(eight[1:], up(eight[0], last))[:, :, :9, :11],
        project(sixteen, last),
        project(thirty_two[1:], max_pool2d(last, 2, ceil_mode=True)),
    )
    coarse, fine, levels, _ = neck(Features(last, None, (last,)), (68, 84))
    for found, own in zip(levels, expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    assert fine is levels[0]
    assert coarse is levels[3]


@pytest.mark.parametrize(("stride", "cells"), [(14, (5, 6)), (16, (5, 6)), (8, (9, 11)), (32, (3, 3))])
def test_sfp_gives_the_same_strides_for_any_patch_size(stride: int, cells: tuple[int, int]) -> None:
    last = torch.randn(1, 4, *cells)
    shapes = [(1, 3, 17, 21), (1, 3, 9, 11), (1, 3, 5, 6), (1, 3, 3, 3)]
    for number, output_stride in ((4, 32), (3, 16), (2, 8)):
        neck = SimpleFeaturePyramid(4, stride, 3, output_stride, read_strides=(4, 8, 16, 32)[:number])
        features = neck(Features(last, None, (last,)), (68, 84))
        assert [tuple(level.shape) for level in features.levels] == [
            *shapes[:number],
            *[shapes[number - 1]] * (4 - number),
        ]
        assert all(level is features.coarse for level in features.levels[number - 1 :])


@pytest.mark.parametrize("head", ["ocr", "ann", "encnet", "deeplabv3plus", "upernet", "segformer"])
@pytest.mark.parametrize("stride", [8, 16, 32])
def test_heads_of_several_levels_have_the_output_stride_with_sfp_and_train_every_weight(
    head: str, stride: OutputStride
) -> None:
    model = small_model(head, backbone="test_vit", neck="sfp", output_stride=stride)
    assert model.features(torch.randn(2, 3, 64, 96)).levels[-1].shape[2:] == (64 // stride, 96 // stride)
    coarse = model.coarse(torch.randn(2, 3, 64, 96))
    sum(output.sum() for output in (coarse.logits, *coarse.branches.values())).backward()  # type: ignore[union-attr]
    neck = model.neck
    assert neck is not None
    assert all(weight.grad is not None for weight in neck.parameters())


@pytest.mark.parametrize(
    ("backbone", "neck", "stride", "channels"),
    [
        ("test_resnet", "jpu", 8, 64),
        ("test_convnext", "jpu", 8, 64),
        ("test_convnext", "resize", 16, 16),
        ("test_vit", "resize", 8, 16),
        ("test_vit", "sfp", 8, 16),
    ],
)
def test_models_with_necks_have_the_wanted_stride_and_train_every_weight(
    backbone: str, neck: NeckName, stride: OutputStride, channels: int
) -> None:
    decoder = backbone != "test_vit" or neck == "sfp"
    model = small_model(backbone=backbone, neck=neck, output_stride=stride, aux=True, decoder=decoder)
    assert isinstance(model.backbone, TimmBackbone)
    assert all(conv.dilation == (1, 1) for conv in model.backbone.net.modules() if isinstance(conv, nn.Conv2d))
    images = torch.randn(2, 3, 67, 97)
    assert model.features(images).coarse.shape == (2, channels, 67 // stride + 1, 97 // stride + 1)
    prediction = model(images)
    assert prediction.logits.shape == (2, 5, 67, 97)
    assert prediction.aux is not None
    (prediction.logits.sum() + prediction.aux.sum()).backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("aux", [{}, {"aux": True}, {"aux": True, "aux_stage": 4}])
def test_a_head_for_several_levels_reads_those_of_sfp(aux: dict[str, Any]) -> None:
    model = small_model(LevelsHead, backbone="test_vit", neck="sfp", output_stride=16, **aux)
    prediction = model(torch.randn(2, 3, 50, 70))
    assert model.coarse(torch.randn(2, 3, 50, 70)).logits.shape == (2, 5, 13, 18)
    (prediction.logits.sum() + (0 if prediction.aux is None else prediction.aux.sum())).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_auxiliary_branch_reads_a_stage_of_the_backbone_before_the_neck() -> None:
    model = small_model("fcn", neck="jpu", output_stride=8, aux=True, aux_stage=3)
    assert model.aux is not None
    assert model.aux[0][0].in_channels == model.backbone.level_channels[2]  # type: ignore[index]


def test_the_output_stride_of_neck_resize_can_be_changed() -> None:
    model = small_model("fcn", neck="resize", output_stride=16).eval()
    images = torch.randn(1, 3, 65, 97)
    assert caaseg.models.with_output_stride(model, 8).coarse(images).logits.shape == (1, 5, 9, 13)


def test_neck_none_is_no_neck() -> None:
    assert small_model("fcn", neck="none").config.neck is None


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("fcn", {"output_stride": 16}, "output_stride is 16, but neck jpu gives 8; use 8"),
        ("fcn", {"multi_grid": (1, 2)}, "multi_grid is (1, 2), but neck jpu does not support it; omit it"),
        ("fcn", {"resnet_variant": "authors"}, "resnet_variant is authors, but neck jpu does not support it; omit it"),
        ("fcn", {"backbone": nn.Identity()}, "has no attribute coarse_channels"),
        ("fcn", {"neck": "fpn"}, "neck is 'fpn'; expected 'resize', 'jpu' or 'sfp'"),
        (
            "fcn",
            {"neck": "sfp"},
            "backbone test_resnet has features of strides [4, 8, 16, 32]; neck sfp needs a plain ViT: use neck resize "
            "or jpu, or another backbone",
        ),
        (
            "fcn",
            {"backbone": "test_vit"},
            "backbone test_vit has features of strides [16, 16, 16, 16]; neck jpu needs strides 8, 16, 32: use neck "
            "resize or sfp, or another backbone",
        ),
        (
            "fcn",
            {"backbone": "test_vit", "neck": "resize", "decoder": True},
            "the decoder needs stride 4: use decoder=False, neck sfp or another backbone",
        ),
        (
            LevelsHead,
            {"neck": "resize"},
            "two levels reads several feature maps, but neck resize gives one; use no neck and output stride 32",
        ),
    ],
)
def test_settings_that_do_not_fit_the_neck_are_refused(
    head: str | type[Head], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaasegError, match=re.escape(message)):
        small_model(head, **{"output_stride": 8, "neck": "jpu", **options})


def test_the_output_stride_of_neck_sfp_cannot_be_changed() -> None:
    model = small_model("fcn", backbone="test_vit", neck="sfp", output_stride=8)
    with pytest.raises(CaasegError, match="the weights of neck sfp are for one output stride"):
        model.rebuild(output_stride=16)
