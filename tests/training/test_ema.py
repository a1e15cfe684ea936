"""Optimizer groups, EMA weights, synchronized batch norm, seeds of steps."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import caaseg
from caaseg.config import OptimizerRecipe
from caaseg.models.backbones import TimmBackbone
from caaseg.training.ema import EMA
from caaseg.training.loop import step_seed
from caaseg.training.optim import make_optimizer
from caaseg.training.setup import synchronize_batch_norm


def model(backbone: str = "test_resnet") -> caaseg.Segmenter:
    torch.manual_seed(0)
    return caaseg.create_model("caa", backbone=backbone, num_classes=3, channels=16, key_channels=4, gate_width=8)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_applies_to_kernels_only_and_the_head_has_its_learning_rate_factor(name: str) -> None:
    network = model()
    optimizer = make_optimizer(network, OptimizerRecipe(name=name, weight_decay=0.1, head_lr_factor=10))  # type: ignore[arg-type]
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(network.parameters()))
    for key, parameter in network.named_parameters():
        group = group_of[id(parameter)]
        assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0), key
        assert group["factor"] == (1 if key.startswith("backbone.") else 10), key


def test_ema_weights_follow_the_model_and_counters_are_copied() -> None:
    network = model()
    ema = EMA(network, 0.5)
    first = network.classifier.weight.detach().clone()
    with torch.no_grad():
        network.classifier.weight += 1
        network.state_dict()["backbone.net.bn1.num_batches_tracked"] += 7
    ema.update(network, step=100)  # late enough for the full decay of 0.5
    torch.testing.assert_close(ema.model.classifier.weight, first + 0.5)
    assert int(ema.model.state_dict()["backbone.net.bn1.num_batches_tracked"]) == 7
    early = EMA(network, 0.999)
    with torch.no_grad():
        network.classifier.weight += 1
    early.update(network, step=0)  # a decay of 1 / 10
    torch.testing.assert_close(early.model.classifier.weight, first + 1.9)
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())


def test_ema_batch_norm_is_averaged_like_the_weights() -> None:
    network = model()
    ema = EMA(network, 0.5)
    network.coarse(torch.randn(2, 3, 32, 32))
    ema.update(network, step=100)
    name = "backbone.net.bn1.running_mean"
    torch.testing.assert_close(ema.model.state_dict()[name], network.state_dict()[name] / 2)


def test_recomputed_batch_norm_equals_that_of_update_bn_and_needs_no_random_numbers() -> None:
    network = model()
    ema = EMA(network, 0.5)
    expected = copy.deepcopy(ema.model)
    for part in expected.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    batches = [torch.randn(2, 3, 32, 32) for _ in range(3)]
    update_bn(batches, expected)
    state = torch.get_rng_state()
    ema.recompute_batch_norm(network, batches, ema.model.coarse)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in ema.model.modules())
    assert ema.model.backbone.net.bn1.momentum == network.backbone.net.bn1.momentum  # type: ignore[union-attr]
    for name, tensor in ema.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], msg=name)


def test_frozen_batch_norm_is_not_recomputed() -> None:
    network = model()
    assert isinstance(network.backbone, TimmBackbone)
    network.backbone.freeze_stages(1)
    ema = EMA(network, 0.5)
    before = {name: tensor.clone() for name, tensor in ema.model.state_dict().items()}
    ema.recompute_batch_norm(network, [torch.randn(2, 3, 32, 32)], ema.model.coarse)
    changed = {name for name, tensor in ema.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert not any(name.startswith(("backbone.net.bn1", "backbone.net.layer1")) for name in changed)
    assert "backbone.net.layer2.0.bn1.running_mean" in changed


@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
def test_every_batch_norm_is_replaced_by_synchronized_batch_norm(backbone: str) -> None:
    plain = model(backbone).eval()
    images = torch.randn(2, 3, 33, 33)
    expected = plain(images).logits
    norms = sum(isinstance(part, nn.BatchNorm2d) for part in plain.modules())
    converted = synchronize_batch_norm(plain)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in converted.modules())
    assert sum(isinstance(part, nn.SyncBatchNorm) for part in converted.modules()) == norms
    torch.testing.assert_close(converted(images).logits, expected)  # activations inside timm's layers remain


def test_every_seed_step_and_rank_has_its_own_random_stream() -> None:
    seeds = [step_seed(seed, step, rank) for seed in range(3) for step in range(20) for rank in range(4)]
    assert len(set(seeds)) == len(seeds)
