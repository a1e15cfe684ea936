"""timm backbones: output strides, variants, stages and weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from caaseg.config import Dilation, OutputStride
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone
from caaseg.models.weights import load_backbone_weights

LARGE = {
    "resnet50": 2048,
    "resnet101": 2048,
    "xception65": 2048,
    "tf_efficientnet_b5": 512,
    "tf_efficientnet_b7": 640,
}


@pytest.fixture(scope="module")
def resnet18() -> TimmBackbone:
    """A backbone with weights, to read only."""
    return TimmBackbone("resnet18", output_stride=16).eval()


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        ("resnet50", 16),
        ("xception65", 8),
        ("tf_efficientnet_b5", 8),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in ("resnet50", "resnet101", "tf_efficientnet_b7")),
        *(pytest.param(name, 16, marks=pytest.mark.slow) for name in LARGE if name != "resnet50"),
    ],
)
def test_the_five_backbones_of_the_paper_give_the_right_sizes(name: str, stride: OutputStride) -> None:
    with torch.device("meta"):
        backbone = TimmBackbone(name, output_stride=stride, with_fine=True).eval()
        coarse, fine, *_ = backbone(torch.empty(1, 3, 513, 513))
    cells = {8: 65, 16: 33}[stride]
    assert coarse.shape == (1, LARGE[name], cells, cells)
    assert backbone.coarse_channels == LARGE[name]
    assert fine is not None
    assert fine.shape == (1, backbone.fine_channels, 129, 129)


@pytest.mark.parametrize("stride", [8, 16])
def test_the_authors_variant_has_a_deep_stem_and_strides_in_last_blocks(stride: OutputStride) -> None:
    with torch.device("meta"):
        backbone = TimmBackbone(
            "resnet50", output_stride=stride, variant="authors", multi_grid=(1, 2, 4), with_fine=True
        ).eval()
        coarse, fine, *_ = backbone(torch.empty(1, 3, 513, 513))
    net = backbone.net
    assert [m.out_channels for m in net.conv1 if isinstance(m, nn.Conv2d)] == [64, 64, 128]
    assert net.layer1[0].conv2.stride == (1, 1)
    assert net.layer1[-1].conv2.stride == (2, 2)
    assert net.layer2[-1].conv2.stride == ((2, 2) if stride == 16 else (1, 1))
    assert net.layer3[-1].conv2.dilation == ((2, 2) if stride == 16 else (4, 4))
    base = {16: 2, 8: 4}[stride]
    assert [block.conv2.dilation[0] for block in net.layer4] == [base, 2 * base, 4 * base]
    assert (backbone.mean, backbone.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    cells = {8: 65, 16: 33}[stride]
    assert coarse.shape == (1, 2048, cells, cells)
    assert fine is not None
    assert fine.shape == (1, 256, 129, 129)


def test_the_authors_variant_with_timm_dilation_equals_the_variant_of_earlier_versions() -> None:
    with torch.device("meta"):
        backbone = TimmBackbone("resnet50", output_stride=8, variant="authors", dilation="timm")
    net = backbone.net
    assert [block.conv2.dilation[0] for block in [*net.layer2, *net.layer3, *net.layer4]] == [1] * 4 + [2] * 6 + [4] * 3
    assert type(net.layer1[-1].conv2) is nn.Conv2d
    assert net.layer1[-1].conv2.padding == (1, 1)
    assert isinstance(net.layer1[-1].downsample, nn.MaxPool2d)
    assert {module.eps for module in net.modules() if isinstance(module, nn.BatchNorm2d)} == {1e-5}
    assert backbone.mean == (0.485, 0.456, 0.406)


def test_the_authors_variant_runs_and_learns() -> None:
    backbone = TimmBackbone("resnet18", output_stride=8, variant="authors")
    coarse, fine, *_ = backbone(torch.randn(2, 3, 33, 41))
    assert coarse.shape == (2, 512, 5, 6)
    assert fine is None
    coarse.sum().backward()
    assert all(weight.grad is not None for weight in backbone.parameters())


@pytest.mark.parametrize(
    ("dilation", "stride", "rates"),
    [("authors", 16, [2, 4, 8]), ("authors", 8, [4, 8, 16]), ("timm", 16, [1, 4, 8]), (None, 8, [2, 8, 16])],
)
def test_multi_grid_multiplies_the_dilation_of_the_last_stage(
    dilation: Dilation | None, stride: OutputStride, rates: list[int]
) -> None:
    with torch.device("meta"):
        gridded = TimmBackbone("resnet50", output_stride=stride, multi_grid=(1, 2, 4), dilation=dilation).eval()
        assert gridded(torch.empty(1, 3, 65, 65)).coarse.shape == (1, 2048, 65 // stride + 1, 65 // stride + 1)
    assert [block.conv2.dilation[0] for block in gridded.net.layer4] == rates


def test_both_convolutions_of_a_basic_block_without_its_stride_are_dilated_like_the_authors() -> None:
    with torch.device("meta"):
        net = TimmBackbone("resnet18", output_stride=8, stages=3, dilation="authors").net
    assert [(block.conv1.dilation[0], block.conv2.dilation[0]) for block in net.layer3] == [(2, 2), (2, 2)]
    assert [(block.conv1.dilation[0], block.conv2.dilation[0]) for block in net.layer2] == [(1, 1), (1, 1)]


def test_top_features_come_after_the_top_convolution_and_load_from_a_file(tmp_path: Path) -> None:
    import timm

    whole = timm.create_model("test_efficientnet").eval()
    save_file(whole.state_dict(), tmp_path / "w.safetensors")
    backbone = TimmBackbone("test_efficientnet", output_stride=16, top_features=True).eval()
    load_backbone_weights(backbone, tmp_path / "w.safetensors")
    images = torch.randn(1, 3, 32, 48)
    dilated: Any = timm.create_model("test_efficientnet", output_stride=16).eval()
    dilated.load_state_dict(whole.state_dict())
    coarse = backbone(images).coarse
    assert coarse.shape == (1, backbone.coarse_channels, 2, 3)
    torch.testing.assert_close(coarse, dilated.forward_features(images))


STAGED = {
    "test_resnet": {2: 48, 3: 192, 4: 96},
    "test_efficientnet": {2: 32, 3: 48, 4: 64},
    "mobilenetv3_small_050": {2: 16, 3: 24, 4: 288},
    "test_convnext": {2: 32, 3: 48, 4: 64},  # its first feature map has stride 4, that of the others stride 2
}


@pytest.mark.parametrize(
    "name",
    [
        "test_resnet",
        "test_efficientnet",
        pytest.param("mobilenetv3_small_050", marks=pytest.mark.slow),
        pytest.param("test_convnext", marks=pytest.mark.slow),
    ],
)
def test_unused_stages_are_not_built(name: str) -> None:
    with torch.device("meta"):
        whole = TimmBackbone(name, output_stride=8)
        for stages, channels in STAGED[name].items():
            for stride in (8, 16) if stages > 2 else (8,):
                backbone = TimmBackbone(name, output_stride=stride, stages=stages, with_fine=True).eval()
                coarse, fine, *_ = backbone(torch.empty(2, 3, 64, 96))
                assert coarse.shape == (2, channels, 64 // stride, 96 // stride)
                assert backbone.coarse_channels == channels
                assert fine is not None
                assert fine.shape[2:] == (16, 24)
                coarse.sum().backward()
                assert all(weight.grad is not None for weight in backbone.parameters())  # every weight is used
                names = set(backbone.state_dict())
                assert names <= set(whole.state_dict())
                assert (names == set(whole.state_dict())) == (stages == 4)


def test_three_stages_of_a_resnet18_equal_those_of_the_full_network(resnet18: TimmBackbone) -> None:
    whole, part = resnet18, TimmBackbone("resnet18", output_stride=16, stages=3)
    assert sum(weight.numel() for weight in part.parameters()) == 2_782_784
    part.load_state_dict({name: tensor for name, tensor in whole.state_dict().items() if "layer4" not in name})
    images = torch.randn(2, 3, 65, 49)
    assert torch.equal(part.eval()(images).coarse, whole.net(images)[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "resnet18", "stages": 2},
            "backbone resnet18 with stages=2 does not support output stride 16; it supports 8",
        ),
        (
            {"name": "resnet18", "stages": 1},
            "backbone resnet18 with stages=1 does not support output stride 16; it supports none of 8, 16 and 32",
        ),
        (
            {"name": "resnet18", "stages": 5},
            "stages is 5, but backbone resnet18 has 4; use fewer, or none for all",
        ),
        (
            {"name": "xception41", "stages": 3},
            "stages is 3, but backbone xception41 cannot be truncated; leave stages out, or use",
        ),
        (
            {"name": "resnet50", "stages": 3, "multi_grid": (1, 2, 4)},
            "multi_grid is (1, 2, 4), but stages=3 leaves out the last stage of resnet50, to which multi_grid applies",
        ),
        ({"name": "resnet5"}, "backbone 'resnet5' is not a timm model; did you mean resnet50"),
        ({"name": "vgg11"}, "backbone vgg11 does not support output stride 16; it supports 32"),
        (
            {"name": "swin_tiny_patch4_window7_224"},
            "backbone swin_tiny_patch4_window7_224 does not support output stride 16; it supports 32; or use neck "
            "resize or jpu, for its features of stride 4, 8, 16, 32",
        ),
        (
            {"name": "test_efficientnet", "multi_grid": (1, 2, 4)},
            "backbone test_efficientnet is not a plain ResNet, which multi_grid needs; use a ResNet, or leave out",
        ),
        (
            {"name": "resnet18", "multi_grid": (1, 2, 4)},
            "multi_grid has 3 factors, (1, 2, 4), but the last stage of resnet18 has 2 blocks; expected one",
        ),
        (
            {"name": "convnext_atto", "dilation": "authors"},
            "backbone convnext_atto: dilation authors supports only ResNets and EfficientNets; use dilation timm",
        ),
        (
            {"name": "resnet18", "top_features": True},
            "backbone resnet18 is not an EfficientNet, which top_features needs; use an EfficientNet, or leave out",
        ),
        (
            {"name": "mobilenetv2_100", "variant": "authors"},
            "is not a plain ResNet, which the authors' variant needs",
        ),
        ({"name": "resnet50d", "variant": "authors"}, "is not a plain ResNet, which the authors' variant needs"),
        ({"name": "res2net50_26w_4s", "variant": "authors"}, "is not a plain ResNet, which the authors' variant needs"),
        (
            {"name": "resnet18", "variant": "authors", "hub_weights": True},
            "backbone resnet18: no ImageNet weights are published for the authors' variant",
        ),
    ],
)
def test_errors_name_the_unsupported_option_and_the_alternatives(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TimmBackbone(**options, output_stride=16)


def test_an_unreachable_hub_raises_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CaasegError) as caught:
        TimmBackbone("resnet18", output_stride=16, hub_weights=True)
    message = str(caught.value)
    assert message.startswith("backbone resnet18: its ImageNet weights could not be downloaded from the hub (")
    assert "use pretrained=False, or a file that you have: pretrained=PATH" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("name", ["test_vit.r160_in1k", "test_convnext.r160_in1k", "test_resnet.r160_in1k"])
def test_weights_of_the_hub_are_loaded_into_feature_networks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / f"models--timm--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    torch.manual_seed(1)
    whole = timm.create_model(name).state_dict()
    save_file(whole, snapshot / "model.safetensors")
    loaded, from_file = (TimmBackbone(name, output_stride=None, hub_weights=hub) for hub in (True, False))
    load_backbone_weights(from_file, snapshot / "model.safetensors")
    ours = from_file.state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("resnet18", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
        ("test_resnet", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ],
)
def test_mean_and_std_are_those_of_the_published_weights(
    name: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    with torch.device("meta"):
        backbone = TimmBackbone(name, output_stride=16)
    assert (backbone.mean, backbone.std) == (mean, std)


@pytest.mark.parametrize(
    ("name", "stages", "ending"),
    [
        ("test_resnet", 3, ".pth"),
        ("test_efficientnet", None, ".pth"),
        ("test_efficientnet", 3, ".safetensors"),
        ("test_vit", None, ".safetensors"),
        ("test_convnext", None, ".pth"),
        pytest.param("swin_tiny_patch4_window7_224", None, ".safetensors", marks=pytest.mark.slow),
        pytest.param("vit_tiny_patch16_dinov3_qkvb", None, ".pth", marks=pytest.mark.slow),
        pytest.param("hrnet_w18_small", None, ".pth", marks=pytest.mark.slow),
        pytest.param("fastvit_t8", None, ".pth", marks=pytest.mark.slow),
        pytest.param("pvt_v2_b0", None, ".pth", marks=pytest.mark.slow),
        pytest.param("legacy_xception", None, ".pth", marks=pytest.mark.slow),
        pytest.param("resnet18", None, ".safetensors", marks=pytest.mark.slow),
        pytest.param("xception41", None, ".safetensors", marks=pytest.mark.slow),
    ],
)
def test_backbone_weights_come_from_a_file_with_or_without_classifier(
    name: str, stages: int | None, ending: str, tmp_path: Path
) -> None:
    import timm

    torch.manual_seed(1)
    whole = timm.create_model(name)  # as published: with a classifier, in timm's naming (torchvision's for ResNets)
    state = {key: value for key, value in whole.state_dict().items() if not key.endswith("num_batches_tracked")}
    path = tmp_path / f"weights{ending}"
    if ending == ".pth":
        torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, path)
    else:
        save_file(state, path)
    backbone = TimmBackbone(name, output_stride=None, stages=stages)
    load_backbone_weights(backbone, path)
    ours = backbone.net.state_dict()
    compared = 0
    for key, value in state.items():
        names = (key, key.replace(".", "_", 1), f"model.{key}", f"body.{key}")
        mine = next((ours[name] for name in names if name in ours), None)
        if mine is not None:
            assert torch.equal(mine, value), key
            compared += 1
    assert compared == sum(not key.endswith("num_batches_tracked") for key in ours)


def test_backbone_weights_in_the_naming_of_their_authors_are_converted(tmp_path: Path) -> None:
    import timm

    whole = timm.create_model("test_vit").state_dict()
    published = {key: tensor for key, tensor in whole.items() if not key.startswith("head.")}
    published["mask_token"] = torch.zeros(1, 64)  # of DINOv2, which timm's model does not have
    torch.save(published, tmp_path / "dinov2.pth")
    backbone = TimmBackbone("test_vit", output_stride=16)
    load_backbone_weights(backbone, tmp_path / "dinov2.pth")
    assert all(torch.equal(whole[key.removeprefix("model.")], t) for key, t in backbone.net.state_dict().items())


@pytest.mark.parametrize(
    ("name", "last"), [("test_resnet", "layer4."), pytest.param("convnext_atto", "stages_3.", marks=pytest.mark.slow)]
)
def test_weight_files_with_and_without_the_unused_stages_are_loaded(name: str, last: str, tmp_path: Path) -> None:
    whole = dict(TimmBackbone(name, output_stride=16).net.state_dict())  # timm's naming of features
    used = {key: tensor for key, tensor in whole.items() if not key.startswith(last)}
    assert len(used) < len(whole)
    for state in (whole, used):
        save_file(state, tmp_path / "w.safetensors")
        backbone = TimmBackbone(name, output_stride=16, stages=3)
        load_backbone_weights(backbone, tmp_path / "w.safetensors")
        assert all(torch.equal(tensor, used[key]) for key, tensor in backbone.net.state_dict().items())
    with pytest.raises(ValueError, match=f"the weights do not fit the model; .* missing: {re.escape(last)}"):
        load_backbone_weights(TimmBackbone(name, output_stride=16), tmp_path / "w.safetensors")


def test_weights_that_do_not_fit_are_listed_and_nothing_is_loaded(resnet18: TimmBackbone, tmp_path: Path) -> None:
    backbone = resnet18
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    state = dict(backbone.net.state_dict())
    del state["layer1.0.conv1.weight"]
    state["conv1.weight"] = torch.zeros(64, 1, 7, 7)
    state["something.else"] = torch.zeros(3)
    save_file(state, tmp_path / "w.safetensors")
    expected = (
        "w.safetensors: the weights do not fit the model; 1 missing: layer1.0.conv1.weight; "
        "1 not in the model: something.else; "
        "1 of another shape: conv1.weight (64, 1, 7, 7) instead of (64, 3, 7, 7)"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_backbone_weights(backbone, tmp_path / "w.safetensors")
    assert all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())


def test_standard_weights_do_not_fit_the_authors_variant_and_unexpected_tensors_are_listed(
    resnet18: TimmBackbone, tmp_path: Path
) -> None:
    save_file(dict(resnet18.net.state_dict()), tmp_path / "w.safetensors")
    with torch.device("meta"):
        authors = TimmBackbone("resnet18", output_stride=16, variant="authors")
    with pytest.raises(ValueError, match=r"not in the model: conv1\.weight"):
        load_backbone_weights(authors, tmp_path / "w.safetensors")
