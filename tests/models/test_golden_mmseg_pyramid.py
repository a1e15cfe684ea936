"""Heads with stored weights give the logits of mmsegmentation 1.2.2 for stored inputs: golden/mmseg_*.npz."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caaseg.config import Architecture
from caaseg.models.heads.base import Head, HeadFeatures
from caaseg.models.heads.danet import DANetHead
from caaseg.models.heads.deeplab import DeepLabV3Head, DeepLabV3PlusHead
from caaseg.models.heads.fcn import FCNHead
from caaseg.models.heads.psp import PSPHead
from caaseg.models.heads.segformer import SegFormerHead
from caaseg.models.heads.upernet import UPerNetHead
from tests.attention.golden import load

TOLERANCE = 2e-5  # largest difference relative to the largest logit; a wrong batch norm epsilon gives 5.5e-4
PROJECTION = {
    "0.weight": "conv.weight",
    "1.weight": "bn.weight",
    "1.bias": "bn.bias",
    "1.running_mean": "bn.running_mean",
    "1.running_var": "bn.running_var",
}
"""Weight of our convolution with batch norm -> name in mmsegmentation."""
POOLING = {f"pooling.branches.{k}": f"psp_modules.{k}.1" for k in range(4)} | {"pooling.bottleneck": "bottleneck"}
SEPARABLE = {"0": "depthwise_conv", "1": "pointwise_conv"}


class Stored:
    """A golden file."""

    def __init__(self, name: str) -> None:
        arrays = load(f"mmseg_{name}.npz")
        self.config: dict[str, Any] = json.loads(str(arrays["config"]))
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items() if value.dtype.kind == "f"}
        self.weights = {key.removeprefix("w/"): tensor for key, tensor in tensors.items() if key.startswith("w/")}
        self.inputs = [tensor for key, tensor in tensors.items() if key.startswith("input")]
        self.outputs = {key: tensor for key, tensor in tensors.items() if key.endswith("logits")}

    def fill(self, head: Head, projections: dict[str, str], others: dict[str, str] | None = None) -> None:
        """Copy all stored weights except classifiers into a head, and check that they are all of its weights.

        Args:
            head: our head.
            projections: names of our projections, and of theirs.
            others: names of our other weights, and of theirs.
        """
        names = {f"{a}.{c}": f"{b}.{d}" for a, b in projections.items() for c, d in PROJECTION.items()} | (others or {})
        ours = {name for name in head.state_dict() if not name.endswith("num_batches_tracked")}
        assert names.keys() == ours
        theirs = [name for name in self.weights if "conv_seg." not in name]
        assert sorted(names.values()) == sorted(theirs)
        assert not head.load_state_dict({a: self.weights[b] for a, b in names.items()}, strict=False).unexpected_keys
        head.eval()

    def check(self, features: Tensor, classifier: str = "conv_seg", key: str = "logits") -> None:
        """Classify features with a stored classifier, and compare the logits."""
        found = F.conv2d(features, self.weights[f"{classifier}.weight"], self.weights[f"{classifier}.bias"])
        expected = self.outputs[key]
        assert found.shape == expected.shape
        assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE


def run(head: Callable[[Any], HeadFeatures], features: Any) -> HeadFeatures:
    with torch.no_grad():
        return head(features)


def set_epsilon(head: Head, epsilon: float) -> None:
    """Change the batch norm epsilon of a head that has the CAA authors'."""
    for module in head.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = epsilon


def test_psp() -> None:
    stored = Stored("psp")
    assert stored.config["pool_scales"] == [1, 2, 3, 6]
    head = PSPHead(stored.config["in_channels"], Architecture(channels=stored.config["channels"]))
    stored.fill(head, POOLING)
    stored.check(run(head, stored.inputs[0]).fused)


def aspp(stored: Stored, dilated: dict[str, str]) -> dict[str, str]:
    """Return the names of ASPP, and change the order of its image-level branch, which is our last and their first."""
    channels = stored.config["channels"]
    stored.weights["bottleneck.conv.weight"] = stored.weights["bottleneck.conv.weight"].roll(-channels, dims=1)
    names = {"image_level": "image_pool.1", "pointwise": "aspp_modules.0", "bottleneck": "bottleneck"} | dilated
    return {f"aspp.{ours}": theirs for ours, theirs in names.items()}


def test_deeplabv3() -> None:
    stored = Stored("deeplabv3")
    first, *rates = stored.config["dilations"]
    assert first == 1
    config = Architecture(channels=stored.config["channels"], aspp_rates=tuple(rates))
    head = DeepLabV3Head(stored.config["in_channels"], config)
    stored.fill(head, aspp(stored, {f"dilated.{k}": f"aspp_modules.{k + 1}" for k in range(3)}))
    stored.check(run(head, stored.inputs[0]).fused)


class NarrowDeepLabV3PlusHead(DeepLabV3PlusHead):
    fine_channels = 8


def test_deeplabv3plus() -> None:
    stored = Stored("deeplabv3plus")
    first, *rates = stored.config["dilations"]
    assert first == 1
    assert stored.config["c1_channels"] == NarrowDeepLabV3PlusHead.fine_channels
    config = Architecture(channels=stored.config["channels"], aspp_rates=tuple(rates))
    head = NarrowDeepLabV3PlusHead((stored.config["c1_in_channels"], stored.config["in_channels"]), config)
    dilated = {f"dilated.{k}.{a}": f"aspp_modules.{k + 1}.{b}" for k in range(3) for a, b in SEPARABLE.items()}
    refine = {f"refine.{k}.{a}": f"sep_bottleneck.{k}.{b}" for k in range(2) for a, b in SEPARABLE.items()}
    stored.fill(head, aspp(stored, dilated) | {"fine": "c1_bottleneck"} | refine)
    stored.check(run(head, stored.inputs).fused)


def test_upernet() -> None:
    stored = Stored("upernet")
    assert stored.config["pool_scales"] == [1, 2, 3, 6]
    head = UPerNetHead(stored.config["in_channels"], Architecture(channels=stored.config["channels"]))
    levels = {f"laterals.{k}": f"lateral_convs.{k}" for k in range(3)} | {
        f"outputs.{k}": f"fpn_convs.{k}" for k in range(3)
    }
    stored.fill(head, POOLING | levels | {"bottleneck": "fpn_bottleneck"})
    stored.check(run(head, stored.inputs).fused)


def test_segformer() -> None:
    stored = Stored("segformer")
    head = SegFormerHead(stored.config["in_channels"], Architecture(channels=stored.config["channels"]))
    stored.fill(head, {f"projections.{k}": f"convs.{k}" for k in range(4)} | {"bottleneck": "fusion_conv"})
    stored.check(run(head, stored.inputs).fused)


def test_fcn() -> None:
    stored = Stored("fcn")
    settings = {key: stored.config[key] for key in ("channels", "num_convs", "concat_input")}
    head = FCNHead(stored.config["in_channels"], Architecture(**settings))
    stored.fill(head, {"entry": "convs.0", "more.0": "convs.1", "joint": "conv_cat"})
    set_epsilon(head, 1e-5)
    stored.check(run(head, stored.inputs[0]).fused)


def test_danet() -> None:
    stored = Stored("danet")
    channels, keys = stored.config["channels"], stored.config["pam_channels"]
    head = DANetHead(stored.config["in_channels"], Architecture(channels=channels))
    head.position.queries, head.position.keys = nn.Conv2d(channels, keys, 1), nn.Conv2d(channels, keys, 1)
    branches = {"spatial": "pam", "channel": "cam"}
    ends = {f"{a}_entry": f"{b}_in_conv" for a, b in branches.items()} | {
        f"{a}_exit": f"{b}_out_conv" for a, b in branches.items()
    }
    parts = {"queries": "query_project", "keys": "key_project", "values": "value_project"}
    attention = {f"position.{a}.{kind}": f"pam.{b}.{kind}" for a, b in parts.items() for kind in ("weight", "bias")}
    stored.fill(head, ends, attention | {"position.scale": "pam.gamma.scale", "channel.scale": "cam.gamma.scale"})
    set_epsilon(head, 1e-5)
    found = run(head, stored.inputs[0])
    stored.check(found.fused)
    for ours, theirs in branches.items():
        stored.check(found.branches[ours], f"{theirs}_conv_seg", f"{theirs}_logits")
