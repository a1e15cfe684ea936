"""Options for training a timm backbone: drop path, frozen stages, gradient checkpointing and numbered layers."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caaseg
from caaseg.errors import CaasegError
from caaseg.models.backbones import TimmBackbone
from caaseg.models.folding import fold_batch_norm
from caaseg.models.fused_norm import fuse_batch_norm
from caaseg.models.timm_networks import BasicBlock, Bottleneck
from tests.models.families import shallow


def random_backbone(name: str, **options: Any) -> TimmBackbone:
    torch.manual_seed(0)
    return TimmBackbone(name, **{"output_stride": None, **options})


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_drop_path_is_active_in_training_only(name: str) -> None:
    plain, dropping = random_backbone(name).eval(), random_backbone(name, drop_path=0.9)
    for weight in dropping.parameters():
        nn.init.normal_(weight)  # of residual branches they are initially 0
    images = torch.randn(4, 3, 32, 32)
    assert not torch.equal(dropping(images).coarse, dropping(images).coarse)
    plain.load_state_dict(dropping.state_dict())
    assert torch.equal(dropping.eval()(images).coarse, plain(images).coarse)


def test_drop_path_is_an_argument_of_create_model() -> None:
    model = caaseg.create_model("fcn", backbone="test_vit", num_classes=2, channels=8, drop_path=0.9)
    images = torch.randn(4, 3, 32, 32)
    assert not torch.equal(model.backbone(images).coarse, model.backbone(images).coarse)
    assert "drop_path" not in model.config.as_dict()


@pytest.mark.parametrize("name", ["test_resnet", "resnet26t"])
def test_block_dropout_is_active_in_training_only_and_changes_no_parameter_names(name: str) -> None:
    plain, dropping = random_backbone(name).eval(), random_backbone(name, block_dropout=0.5)
    for weight in dropping.parameters():
        nn.init.normal_(weight)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(dropping(images).coarse, dropping(images).coarse)
    assert list(plain.state_dict()) == list(dropping.state_dict())
    plain.load_state_dict(dropping.state_dict())
    assert torch.equal(dropping.eval()(images).coarse, plain(images).coarse)


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_block_dropout_zeroes_inputs_of_the_last_convolution_also_with_fused_batch_norm(kind: Any) -> None:
    model = caaseg.create_model(
        "fcn", backbone="resnet10t" if kind is BasicBlock else "resnet14t", num_classes=2, channels=8, block_dropout=0.5
    )
    block: Any = next(module for module in model.backbone.modules() if type(module) is kind)
    last = block.conv2 if kind is BasicBlock else block.conv3
    shares: list[float] = []
    last.register_forward_pre_hook(lambda _, inputs: shares.append((inputs[0] == 0).float().mean().item()))
    images = torch.randn(2, 3, 64, 64)
    model.coarse(images)
    fuse_batch_norm(model)
    model.coarse(images)
    model.eval().coarse(images)
    assert type(block) is not kind  # it is fused
    # ReLU zeroes about half of the inputs, and dropout half of the others.
    assert shares == pytest.approx([0.75, 0.75, 0.5], abs=0.06)


def test_a_model_with_block_dropout_is_folded_like_one_without() -> None:
    options: dict[str, Any] = {"backbone": "test_resnet", "num_classes": 2, "channels": 8}
    plain, dropping = (caaseg.create_model("fcn", **options, block_dropout=rate).eval() for rate in (0.0, 0.5))
    plain.load_state_dict(dropping.state_dict())
    folded = [fold_batch_norm(model) for model in (plain, dropping)]
    assert [type(module) for module in folded[0].modules()] == [type(module) for module in folded[1].modules()]
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(folded[0](images).logits, folded[1](images).logits)


def test_block_dropout_needs_a_resnet() -> None:
    message = "block_dropout needs a ResNet, but the backbone is test_efficientnet; use a ResNet, or leave it out"
    with pytest.raises(CaasegError, match=message):
        random_backbone("test_efficientnet", block_dropout=0.2)
    module = random_backbone("test_resnet")
    with pytest.raises(CaasegError, match="block_dropout is for timm backbones; set it in the backbone module"):
        caaseg.create_model("fcn", backbone=module, num_classes=2, block_dropout=0.2)


def gradients(backbone: TimmBackbone, images: Tensor) -> list[Tensor]:
    features = backbone(images)
    loss = torch.stack([level.square().mean() for level in features.levels]).sum()
    return list(torch.autograd.grad(loss, [weight for weight in backbone.parameters() if weight.requires_grad]))


@pytest.mark.parametrize(
    "name",
    [
        "test_resnet",
        "test_vit",
        "test_convnext",
        "test_efficientnet",
        pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow),
        pytest.param("vit_tiny_patch16_dinov3_qkvb", marks=pytest.mark.slow),
        pytest.param("fastvit_t8", marks=pytest.mark.slow),
    ],
)
def test_gradient_checkpointing_gives_the_same_gradients_and_statistics(name: str) -> None:
    plain = random_backbone(shallow(name)).double()
    checkpointed = copy.deepcopy(plain)
    checkpointed.checkpoint_gradients()
    calls: list[nn.Module] = []
    for module in checkpointed.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    found = gradients(checkpointed, images)
    assert len(calls) > len(set(calls))  # some modules ran twice
    for expected, own in zip(gradients(plain, images), found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)
    ours = checkpointed.state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in plain.state_dict().items())


@pytest.mark.parametrize(
    ("name", "number", "frozen", "trained"),
    [
        ("test_resnet", 1, ("conv1", "bn1", "layer1"), ("layer2", "layer3", "layer4")),
        ("test_resnet", 4, ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"), ()),
        ("test_convnext", 2, ("stem_", "stages_0", "stages_1"), ("stages_2", "stages_3")),
        (
            "test_vit",
            2,
            ("model.cls_token", "model.pos_embed", "model.patch_embed", "model.blocks.0.", "model.blocks.1."),
            ("model.blocks.2.", "model.blocks.3.", "model.blocks.4.", "model.blocks.5.", "model.norm"),
        ),
    ],
)
def test_frozen_stages_include_the_stem(
    name: str, number: int, frozen: tuple[str, ...], trained: tuple[str, ...]
) -> None:
    backbone = random_backbone(name)
    backbone.freeze_stages(number)
    for key, parameter in backbone.net.named_parameters():
        assert key.startswith(trained if parameter.requires_grad else frozen), key


def test_frozen_stages_stay_in_evaluation_mode_and_can_be_released() -> None:
    backbone = random_backbone("test_resnet")
    backbone.freeze_stages(2)
    net = backbone.train().net
    assert not any(module.training for stage in (net.bn1, net.layer1, net.layer2) for module in stage.modules())
    assert all(module.training for module in net.layer3.modules())
    backbone.freeze_stages(0)
    assert all(module.training for module in backbone.modules())
    assert all(parameter.requires_grad for parameter in backbone.parameters())


def test_layers_are_numbered_from_the_stem() -> None:
    layers = random_backbone("test_vit").layers(coarse=False, option="layer_decay")
    assert layers["model.pos_embed"] == layers["model.patch_embed.proj.weight"] == 0
    assert [layers[f"model.blocks.{k}.attn.qkv.weight"] for k in range(6)] == [1, 2, 3, 4, 5, 6]
    assert layers["model.norm.weight"] == 6
    authors = random_backbone("resnet18", output_stride=16, variant="authors")
    assert authors.layers(coarse=True, option="frozen_stages")["conv1.0.weight"] == 0  # no tensor of timm's ResNet-18


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("efficientvit_b0", "drop_path", "backbone efficientvit_b0 does not support drop_path; leave it out, or use"),
        ("hrnet_w18_small", "drop_path", "backbone hrnet_w18_small does not support drop_path; leave it out, or use"),
        ("caformer_s18", "freeze", "backbone caformer_s18: timm does not number its layers, but frozen_stages needs"),
        ("repvit_m0_9", "freeze", "backbone repvit_m0_9: timm does not number its layers, but frozen_stages needs"),
        ("test_resnet", "freeze", "frozen_stages is 5, but backbone test_resnet has 4 stages; use fewer"),
    ],
)
def test_options_that_a_backbone_does_not_support_are_refused(name: str, option: str, message: str) -> None:
    with torch.device("meta"):
        backbone = random_backbone(name)
    with pytest.raises(CaasegError, match=re.escape(message)):
        random_backbone(name, drop_path=0.1) if option == "drop_path" else backbone.freeze_stages(5)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("hrnet_w18_small", {}, "timm does not recompute any of its modules"),
        ("resnet18", {"variant": "authors", "output_stride": 16}, "timm does not recompute any of its modules"),
    ],
)
def test_gradient_checkpointing_without_effect_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    backbone = random_backbone(name, **options)
    with pytest.raises(CaasegError, match=f"backbone {name} does not support gradient_checkpointing \\({reason}\\)"):
        backbone.checkpoint_gradients()
