"""Models: every head on small backbones, with and without decoder and auxiliary classifier."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import cross_entropy

import caaseg
from caaseg.attention import ChannelizedAxialAttention
from caaseg.models import HEADS, ModelConfig, with_output_stride
from caaseg.models.heads.axial import SqueezedAxialAttention
from caaseg.models.segmenter import resize_prediction

FAST_MODELS = [
    *((head, "test_resnet", 16, True, True) for head in HEADS),
    ("caa", "test_resnet", 8, False, False),
    ("caa", "test_efficientnet", 8, True, False),
    ("danet", "test_efficientnet", 16, False, True),
    ("fcn", "resnet18", 16, False, False),
]
ALL_MODELS = [
    *product(HEADS, ["test_resnet"], [8], [False, True], [False, True]),
    *product(HEADS, ["test_efficientnet"], [16], [False, True], [True]),
]
BRANCHES = {"danet": {"spatial", "channel"}, "axial_se": {"channel"}, "ocr": {"regions"}}
SMALL: dict[str, Any] = {"num_classes": 5, "channels": 16, "key_channels": 4, "gate_width": 8}


def build(head: str, backbone: str = "test_resnet", **options: Any) -> caaseg.Segmenter:
    torch.manual_seed(0)
    return caaseg.create_model(head, backbone=backbone, **{**SMALL, **options})


def test_a_narrow_decoder_has_fewer_parameters(tmp_path: Path) -> None:
    wide, narrow = (build("caa", "test_resnet", decoder=True, **options) for options in ({}, {"decoder_channels": 24}))
    assert (wide.classifier.in_channels, narrow.classifier.in_channels) == (256, 24)
    assert sum(p.numel() for p in narrow.parameters()) < sum(p.numel() for p in wide.parameters()) / 2
    narrow.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 41, 33)
    assert torch.equal(caaseg.load_model(tmp_path)(images).logits, narrow.eval()(images).logits)


@pytest.mark.parametrize(
    ("head", "backbone", "stride", "decoder", "aux"),
    [
        *FAST_MODELS,
        *(pytest.param(*model, marks=pytest.mark.slow) for model in ALL_MODELS if model not in FAST_MODELS),
    ],
)
def test_every_model_predicts_and_learns(head: str, backbone: str, stride: int, decoder: bool, aux: bool) -> None:
    model = build(head, backbone, output_stride=stride, decoder=decoder, aux=aux)
    for weight in model.parameters():
        if not weight.any():  # such as DANet's scales, before which nothing learns yet
            nn.init.normal_(weight, 0, 0.5)
    images, labels = torch.randn(2, 3, 41, 33), torch.randint(5, (2, 41, 33))
    coarse = model.coarse(images)
    prediction = resize_prediction(coarse, (41, 33))
    outputs = [prediction.logits, *prediction.branches.values(), *([] if prediction.aux is None else [prediction.aux])]
    assert (prediction.aux is not None) == aux
    assert prediction.branches.keys() == BRANCHES.get(head, set())
    assert all(output.shape == (2, 5, 41, 33) for output in outputs)

    losses = [cross_entropy(output, labels) for output in outputs]
    if coarse.presence is not None:
        assert coarse.presence.shape == (2, 5)
        losses.append(coarse.presence.square().mean())
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert [name for name in without if not name.startswith("backbone.")] == []
    assert [name for name in without if dict(model.named_parameters())[name].grad is None] == []
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)

    model.eval()
    with torch.no_grad():
        first, again = model(images), model(images)
    assert type(first) is caaseg.Prediction
    assert torch.equal(first.logits, again.logits)
    assert first.aux is None or torch.equal(first.aux, again.aux)
    assert all(torch.equal(branch, again.branches[name]) for name, branch in first.branches.items())
    assert (first.aux is not None) == aux
    assert first.branches.keys() == prediction.branches.keys()


@pytest.mark.parametrize("head", HEADS)
def test_any_input_size_works(head: str) -> None:
    model = build(head, decoder=True, aux=True).eval()
    for size in [(1, 1), (7, 3), (33, 65), (40, 24), (50, 51), (8, 200)]:
        with torch.no_grad():
            prediction = model(torch.randn(1, 3, *size))
        assert prediction.logits.shape == (1, 5, *size)
        assert prediction.logits.isfinite().all()


@pytest.mark.parametrize("se_first", [True, False])
def test_the_loss_of_the_branch_behind_a_stop_gradient_reaches_only_its_classifier(se_first: bool) -> None:
    images, labels = torch.randn(2, 3, 33, 33), torch.randint(5, (2, 33, 33))

    def gradients(with_branch: bool) -> dict[str, Tensor | None]:
        model = build("axial_se", se_first=se_first)
        torch.manual_seed(7)  # the same dropout
        prediction = model(images)
        loss = cross_entropy(prediction.logits, labels)
        if with_branch:
            loss = loss + cross_entropy(prediction.branches["channel"], labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: weight.grad for name, weight in model.named_parameters()}

    without_branch, with_branch = gradients(False), gradients(True)
    for name, gradient in with_branch.items():
        other = without_branch[name]
        assert gradient is not None, name
        if name.startswith("branch_classifiers."):
            assert other is None
            assert gradient.abs().sum() > 0
        else:
            assert other is not None
            assert torch.equal(gradient, other), name


def test_squeeze_and_excitation_can_follow_the_axial_attention() -> None:
    first, second = build("axial_se"), build("axial_se", se_first=False)
    second.load_state_dict(first.state_dict())
    block = second.head.block
    assert isinstance(block, SqueezedAxialAttention)
    features = torch.randn(2, 16, 5, 6)
    block.eval()
    output, branch = block(features)
    torch.testing.assert_close(output, block.squeeze_excitation(block.axial(features)))
    assert torch.equal(output, branch)
    images = torch.randn(1, 3, 33, 33)
    assert not torch.allclose(first.eval()(images).logits, second.eval()(images).logits)


def test_danet_sums_the_features_of_its_branches() -> None:
    model = build("danet").eval()
    coarse = model.backbone(torch.randn(1, 3, 33, 33)).coarse
    fused, branches, *_ = model.head(coarse)
    torch.testing.assert_close(fused, branches["spatial"] + branches["channel"])


def test_a_model_compiles_as_one_graph_at_a_fixed_size() -> None:
    torch.compiler.reset()
    model, images = build("caa").eval(), torch.randn(2, 3, 33, 41)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images).logits, model(images).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_caa_model_compiles_as_one_graph_for_all_sizes() -> None:
    torch.compiler.reset()
    model = build("caa").eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in ((33, 41), (40, 24)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():  # tracing a backward pass too would take twice as long
            torch.testing.assert_close(compiled(images).logits, model(images).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_a_caa_model_exports_with_dynamic_height_and_width(dynamic_batch: bool) -> None:
    model = build("caa", "resnet18").eval()
    dynamic: dict[int, Any] = {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    if dynamic_batch:  # named dimensions with limits: two features or more per side
        dynamic = {0: Dim("n", max=64), 2: Dim("height", min=17, max=2048), 3: Dim("width", min=17, max=2048)}
    batch = 2 if dynamic_batch else 1
    example = torch.randn(batch, 3, 65, 49)
    exported = torch.export.export(model, (example,), dynamic_shapes=(dynamic,), strict=False).module()
    for size in ((33, 41), (40, 24), (65, 49), (100, 17)):
        images = torch.randn(batch + dynamic_batch, 3, *size)
        torch.testing.assert_close(exported(images).logits, model(images).logits, atol=1e-5, rtol=1e-4)


def test_gate_and_implementation_options_reach_the_block() -> None:
    options: dict[str, Any] = {
        "gate_layers": 3,
        "gate_width": 9,
        "gate_activation": "relu",
        "implementation": "grouped",
        "groups": 3,
    }
    model = build("caa", **options)
    block = model.head.block
    assert isinstance(block, ChannelizedAxialAttention)
    assert block.column_gate is not None
    assert len(block.column_gate.hidden) == 3
    assert block.column_gate.last.in_features == 9
    assert block.column_gate.slope == 0
    assert (block.implementation, block.groups) == ("grouped", 3)
    default = build("caa", **{**options, "implementation": "auto"}).eval()
    images = torch.randn(1, 3, 33, 33)
    torch.testing.assert_close(model.eval()(images).logits, default(images).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "cca"}, "head is 'cca'; expected fcn, axial, axial_se, caa"),
        ({"output_stride": 4}, "output_stride is 4; expected 8, 16 or 32"),
        ({"num_classes": 0}, "num_classes is 0; expected greater than or equal to 1"),
        ({"num_classes": "3"}, "num_classes is '3'; expected a valid integer"),
        ({"channels": 0}, "channels is 0; expected greater than or equal to 1"),
        ({"implementation": "bogus"}, "implementation is 'bogus'; expected 'auto', 'factorised', 'grouped'"),
        ({"classes": [1, 2, 3, 4, 5]}, "classes is (1, 2, 3, 4, 5); expected a valid string"),
        ({"classes": ["a", "b"]}, "classes has 2 entries, but num_classes is 5"),
        ({"palette": [(0, 0, 0)]}, "palette has 1 entries, but num_classes is 5"),
        ({"resnet_variant": "mine"}, "resnet_variant is 'mine'; expected 'standard' or 'authors'"),
        ({"gate_layer": 3}, "create_model has no option 'gate_layer'; did you mean gate_layers?"),
    ],
)
def test_create_model_rejects_invalid_options(options: dict[str, Any], message: str) -> None:
    arguments = {"head": "caa", "backbone": "test_resnet", **SMALL, **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        caaseg.create_model(arguments.pop("head"), **arguments)


def test_a_config_is_hashable_and_compares_by_content() -> None:
    first, second = (build("caa", classes=list("abcde"), multi_grid=None).config for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first, ModelConfig)


def test_a_batch_of_one_image_is_rejected_in_training_only() -> None:
    model = build("caa").train()
    with pytest.raises(ValueError, match="a batch of one image cannot be trained on: batch normalization"):
        model(torch.randn(1, 3, 33, 33))
    model.eval()
    assert model(torch.randn(1, 3, 33, 33)).logits.shape == (1, 5, 33, 33)


def test_pretrained_none_and_false_are_the_same() -> None:
    assert build("fcn", pretrained=None).config == build("fcn", pretrained=False).config


@pytest.mark.parametrize("variant", ["standard", "authors"])
def test_another_output_stride_keeps_the_weights(variant: str) -> None:
    backbone = "test_resnet" if variant == "standard" else "resnet18"
    coarse = build("caa", backbone, output_stride=16, resnet_variant=variant, aux=True, decoder=True).eval()
    fine = with_output_stride(coarse, 8)
    assert (coarse.config.output_stride, fine.config.output_stride) == (16, 8)
    assert fine.config == coarse.config.replace(output_stride=8)
    assert not fine.training
    ours, theirs = fine.state_dict(), coarse.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    images = torch.randn(1, 3, 65, 65)
    with torch.no_grad():
        assert coarse.backbone(images).coarse.shape[2:] == (5, 5)
        assert fine.backbone(images).coarse.shape[2:] == (9, 9)
        again = with_output_stride(fine, 16)
        assert torch.equal(again(images).logits, coarse(images).logits)
        assert not torch.equal(fine(images).logits, coarse(images).logits)
    assert with_output_stride(coarse, 16) is coarse
