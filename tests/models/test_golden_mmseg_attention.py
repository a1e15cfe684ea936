"""Heads with mmsegmentation's weights give mmsegmentation's logits."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from caaseg.config import ModelConfig
from caaseg.models.heads.ann import ANNHead
from caaseg.models.heads.base import Head, HeadFeatures
from caaseg.models.heads.ccnet import CCNetHead
from caaseg.models.heads.emanet import EMANetHead
from caaseg.models.heads.encnet import EncNetHead
from caaseg.models.heads.nonlocal_block import NonLocalHead
from caaseg.models.heads.ocr import OCRHead
from caaseg.models.segmenter import classifier
from tests.golden.networks import load

TOLERANCE = 2e-5
LAYERS = {"conv.weight": "0.weight"} | {
    f"bn.{name}": f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
}
"""Names in a convolution with batch normalization: theirs -> ours."""
CONCAT = {"convs.0": "entry", "convs.1": "exit", "conv_cat": "join"}
CCNET = CONCAT | {
    "cca.query_conv": "block.queries",
    "cca.key_conv": "block.keys",
    "cca.value_conv": "block.values",
    "cca.gamma.scale": "block.scale",
}
NONLOCAL = CONCAT | {
    "nl_block.theta.conv": "block.queries",
    "nl_block.phi.conv": "block.keys",
    "nl_block.g.conv": "block.values",
    "nl_block.conv_out": "block.exit",
}
EMANET = {
    "ema_in_conv": "entry",
    "ema_mid_conv.conv.weight": "block.weight",
    "ema_mid_conv.conv.bias": "block.bias",
    "ema_module.bases": "block.bases",
    "ema_out_conv": "block.exit",
    "bottleneck": "exit",
    "conv_cat": "join",
}
ANN = {
    "fusion.stages.0.key_project": "fusion.keys",
    "fusion.stages.0.query_project": "fusion.queries",
    "fusion.stages.0.value_project": "fusion.values",
    "fusion.stages.0.out_project.weight": "fusion.join.0.project_weight",
    "fusion.stages.0.out_project.bias": "fusion.join.0.project_bias",
    "fusion.bottleneck": "fusion.join",
    "bottleneck": "entry",
    "context.stages.0.key_project": "context.keys",
    "context.stages.0.query_project": "context.keys",
    "context.stages.0.value_project": "context.values",
    "context.stages.0.out_project.weight": "context.join.0.project_weight",
    "context.stages.0.out_project.bias": "context.join.0.project_bias",
    "context.bottleneck": "context.join",
}
ENCNET = {
    "bottleneck": "entry",
    "lateral_convs": "lateral",
    "fusion": "join",
    "enc_module.encoding_project": "pixels",
    "enc_module.encoding": "encoding",
    "enc_module.fc.0": "gate",
    "se_layer": "classifier",
}
OCR = {
    "bottleneck": "entry",
    "object_context_block.query_project": "queries",
    "object_context_block.key_project": "keys",
    "object_context_block.value_project": "values",
    "object_context_block.out_project": "exit",
    "object_context_block.bottleneck": "join",
}


def our_name(name: str, table: dict[str, str]) -> str:
    """Return our name of one of mmsegmentation's weights."""
    prefix = max((key for key in table if name == key or name.startswith(f"{key}.")), key=len)
    rest = name.removeprefix(prefix)
    for theirs, ours in LAYERS.items():
        rest = rest.removesuffix(theirs) + ours if rest.endswith(f".{theirs}") else rest
    return table[prefix] + rest


def copy_weights(stored: dict[str, Any], head: Head, table: dict[str, str], without: tuple[str, ...] = ()) -> None:
    """Copy all stored weights of the head; `without` has prefixes of weights of ours that are not stored."""
    ours = head.state_dict()
    filled: dict[str, Tensor] = {}
    for key, value in stored.items():
        name = key.removeprefix("w/")
        if name == key or name.startswith("conv_seg."):
            continue
        weight, target = torch.from_numpy(value), our_name(name, table)
        if target == "block.bases":
            weight = weight.mT  # (1, C, K)
        weight = weight.reshape(ours[target].shape)
        assert torch.equal(filled.setdefault(target, weight), weight)  # shared projections are stored twice
    missing = ours.keys() - filled.keys()
    assert all(name.endswith("num_batches_tracked") or name.startswith(without) for name in missing)
    head.load_state_dict(filled, strict=False)


def logits(stored: dict[str, Any], features: Tensor) -> Tensor:
    """Apply the stored classifier."""
    layer = classifier(features.shape[1], len(stored["w/conv_seg.bias"]))
    layer.load_state_dict({name: torch.from_numpy(stored[f"w/conv_seg.{name}"]) for name in ("weight", "bias")})
    found: Tensor = layer(features)
    return found


def assert_equal(found: Tensor, expected: Any) -> None:
    difference = (found - torch.from_numpy(expected)).abs().max() / abs(expected).max()
    assert float(difference) <= TOLERANCE


def build(name: str) -> tuple[dict[str, Any], Head, dict[str, str]]:
    """Return the stored numbers, our head for their settings, and the names of its weights."""
    stored = load(f"mmseg_{name}")
    given = json.loads(str(stored["config"]))
    shared = {"channels": given["channels"], "num_classes": given["num_classes"]}
    channels: Any = given["in_channels"]
    match name:
        case "ccnet":
            return stored, CCNetHead(channels, ModelConfig(**shared, recurrence=given["recurrence"])), CCNET
        case "nonlocal":
            assert (given["reduction"], given["use_scale"], given["mode"]) == (2, True, "embedded_gaussian")
            return stored, NonLocalHead(channels, ModelConfig(**shared)), NONLOCAL
        case "emanet":
            bases = {"num_bases": given["num_bases"], "iterations": given["num_stages"], "momentum": given["momentum"]}
            shared |= {"channels": given["ema_channels"], "bottleneck_channels": given["channels"]}
            return stored, EMANetHead(channels, ModelConfig(**shared), **bases), EMANET
        case "ann":
            assert given["query_scales"] == [1]
            options = {"key_channels": given["project_channels"], "pool_sizes": given["key_pool_scales"]}
            return stored, ANNHead(channels, ModelConfig(**shared), **options), ANN
        case "ocr":
            config = ModelConfig(**shared, bottleneck_channels=8)
            return stored, OCRHead((8, channels), config, key_channels=given["ocr_channels"]), OCR
    config = ModelConfig(**shared, lateral=given["add_lateral"])
    return stored, EncNetHead(channels, config, num_codes=given["num_codes"]), ENCNET


@pytest.mark.parametrize("name", ["ccnet", "nonlocal", "emanet", "ann", "encnet", "encnet_lateral"])
@torch.no_grad()
def test_heads_give_the_logits_of_mmsegmentation(name: str) -> None:
    stored, head, table = build(name)
    copy_weights(stored, head.eval(), table)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    maps = [torch.from_numpy(stored[key]) for key in sorted(stored) if key.startswith("input")]
    found: HeadFeatures = head(maps[0] if head.levels is None else maps)
    assert_equal(logits(stored, found.fused), stored["logits"])
    assert (found.presence is not None) == ("se_logits" in stored)
    if found.presence is not None:
        assert_equal(found.presence, stored["se_logits"])
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())


@torch.no_grad()
def test_attention_to_regions_gives_the_logits_of_mmsegmentation() -> None:
    stored, head, table = build("ocr")
    assert isinstance(head, OCRHead)
    copy_weights(stored, head.eval(), table, without=("region_entry.", "classifier."))
    entered, regions = head.entry(torch.from_numpy(stored["input"])), torch.from_numpy(stored["prev_logits"])
    assert_equal(logits(stored, head.attend(entered, regions)), stored["logits"])
