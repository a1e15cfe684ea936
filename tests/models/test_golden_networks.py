"""Our backbones and CAA model give the outputs of the authors' code, for weights computed by a formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

import caaseg
from caaseg.models.backbones import TimmBackbone
from caaseg.models.dilation import residual_blocks, spatial_convolutions
from tests.golden.networks import assert_golden, golden_input, load, load_formula_weights

slow = pytest.mark.slow


def resnet(depth: int, stride: Any) -> TimmBackbone:
    """On the meta device: all weights are loaded later."""
    name = f"resnet{depth}"
    with torch.device("meta"):
        return TimmBackbone(name, output_stride=stride, variant="authors", multi_grid=(1, 2, 4), with_fine=True).eval()


def efficientnet(name: str, stride: Any) -> TimmBackbone:
    """On the meta device: all weights are loaded later."""
    name = f"tf_efficientnet_{name}"
    with torch.device("meta"):
        return TimmBackbone(name, output_stride=stride, dilation="authors", top_features=True).eval()


@pytest.mark.parametrize(
    ("depth", "stride", "size"),
    [
        (50, 16, ""),
        (50, 8, "_even"),
        pytest.param(50, 8, "", marks=slow),
        pytest.param(50, 16, "_even", marks=slow),
        pytest.param(101, 16, "", marks=slow),
        pytest.param(101, 8, "", marks=slow),
    ],
)
def test_the_authors_resnet_gives_their_features(depth: int, stride: int, size: str) -> None:
    names, stored = load(f"resnet{depth}_os{stride}"), load(f"resnet{depth}_os{stride}{size}")
    backbone = resnet(depth, stride).to_empty(device="cpu")
    load_formula_weights(backbone, {**names, "seed": stored["seed"]}, prefix="backbone.", check=not size)
    found: dict[str, Tensor] = {}
    net = backbone.net
    net.act1.register_forward_hook(lambda module, inputs, output: found.update(stem=output))
    for number in range(1, 5):
        stage = getattr(net, f"layer{number}")
        stage[-1].register_forward_hook(lambda m, i, o, n=number: found.update({f"stage{n}": o}))
        stage[-2].register_forward_hook(lambda m, i, o, n=number: found.update({f"stage{n}_before_last_block": o}))
    with torch.no_grad():
        coarse, fine, *_ = backbone(golden_input(stored))
    assert torch.equal(coarse, found["stage4"])
    assert fine is not None
    assert torch.equal(fine, found["stage1_before_last_block"])
    compared = [name for name in found if name in stored]
    assert compared == (
        ["stage4"] if size or depth == 101 else [name for name in found if name != "stage4_before_last_block"]
    )
    for name in compared:
        assert_golden(stored, name, found[name])


@pytest.mark.parametrize(("depth", "stride"), [(101, 8), (101, 16), pytest.param(50, 8, marks=slow)])
def test_the_authors_resnet_has_their_strides_and_dilation_rates(depth: int, stride: int) -> None:
    table = load(f"resnet{depth}_os{stride}")["block_table"]
    net = resnet(depth, stride).net
    rows = [
        (stage - 1, number, block.conv2.out_channels, block.conv2.stride[0], block.conv2.dilation[0])
        for stage in range(1, 5)
        for number, block in enumerate(getattr(net, f"layer{stage}"))
    ]
    assert rows == [tuple(row[:5]) for row in (table - [table[0, 0], table[0, 1], 0, 0, 0, 0, 0]).tolist()]


@pytest.mark.parametrize(
    ("name", "stride", "size"),
    [
        ("b0", 8, ""),
        ("b0", 16, "_even"),
        pytest.param("b0", 16, "", marks=slow),
        pytest.param("b0", 8, "_even", marks=slow),
        pytest.param("b5", 8, "", marks=slow),
    ],
)
def test_the_authors_efficientnet_gives_their_features(name: str, stride: int, size: str) -> None:
    names, stored = load(f"efficientnet{name}_os{stride}"), load(f"efficientnet{name}_os{stride}{size}")
    backbone = efficientnet(name, stride).to_empty(device="cpu")
    names = {**names, "seed": stored["seed"]}
    load_formula_weights(backbone, names, prefix="backbone.", blocks=backbone.net.blocks, check=not size)
    with torch.no_grad():
        assert_golden(stored, "final", backbone(golden_input(stored)).coarse)


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize(
    ("name", "channels"),
    [("b0", 1280), pytest.param("b5", 2048, marks=slow), pytest.param("b7", 2560, marks=slow)],
)
def test_the_authors_efficientnet_has_their_strides_and_dilation_rates(name: str, channels: int, stride: int) -> None:
    tables = load("efficientnet_tables")
    backbone = efficientnet(name, stride)
    columns = [list(tables["columns"]).index(column) for column in ("kernel", "stride", "dilation")]
    rows = []
    for block in residual_blocks(backbone.net):
        (convolution,) = spatial_convolutions(block)
        rows.append([convolution.kernel_size[0], convolution.stride[0], convolution.dilation[0]])
    assert rows == tables[f"{name}_os{stride}"][:, columns].tolist()
    assert backbone.coarse_channels == channels == int(tables[f"{name}_top_filters"])


@pytest.mark.parametrize(
    "name",
    [
        "caa_efficientnetb0_os8",
        pytest.param("caa_resnet50_os16", marks=slow),
        pytest.param("caa_resnet50_os8", marks=slow),
    ],
)
def test_the_whole_caa_model_gives_the_authors_logits(name: str) -> None:
    stored = load(name)
    options: dict[str, Any] = {"backbone": "resnet50", "resnet_variant": "authors", "multi_grid": (1, 2, 4)}
    if "efficientnet" in name:
        options = {"backbone": "tf_efficientnet_b0", "dilation": "authors", "top_features": True}
    classes, stride = int(stored["num_class"]), int(stored["output_stride"])
    with torch.device("meta"):
        model = caaseg.create_model("caa", num_classes=classes, output_stride=stride, aux=True, **options).eval()  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    net: Any = model.backbone.net
    load_formula_weights(model, stored, prefix="", blocks=net.blocks if "efficientnet" in name else ())
    images = golden_input(stored)
    with torch.no_grad():
        features = model.features(images).coarse
        coarse, prediction = model.coarse(images), model(images)
    assert_golden(stored, "backbone_feature", features)
    assert_golden(stored, "logits_feature_size", coarse.logits)
    assert_golden(stored, "logits_image_size", prediction.logits)
    assert coarse.aux is not None
    assert prediction.aux is not None
    assert_golden(stored, "aux_logits_feature_size", coarse.aux)
    assert_golden(stored, "aux_logits_image_size_every4", prediction.aux[:, :, ::4, ::4])
