"""The authors' whole head, with their weights, gives their numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, cat, nn

from caaseg.attention import ChannelizedAxialAttention
from caaseg.config import Architecture
from caaseg.models.heads.axial import CAAHead
from tests.attention.golden import load, nchw, parameters, projections, torch_layout


def test_the_head_gives_the_authors_numbers() -> None:
    stored = load("caa_head.npz")
    config = Architecture(
        head="caa",
        channels=int(stored["filters"]),
        key_channels=int(stored["guided_filters"]),
        gate_layers=int(stored["hidden_layers_count"]),
        gate_width=int(int(stored["filters"]) * float(stored["hidden_layer_ratio"])),
    )
    head = CAAHead(stored["input"].shape[-1], config).eval()
    block = head.block
    assert isinstance(block, ChannelizedAxialAttention)
    named = parameters(block)
    units: dict[str, nn.Module] = {
        **projections(block),
        "entry": head.entry,
        "attention_end": head.exit,
        "image_level": head.image_level,
        "bottleneck": head.bottleneck,
    }
    for prefix, unit in units.items():
        state = unit.state_dict()
        for ours, theirs in (
            ("0.weight", "conv_kernel"),
            ("1.weight", "bn_gamma"),
            ("1.bias", "bn_beta"),
            ("1.running_mean", "bn_moving_mean"),
            ("1.running_var", "bn_moving_variance"),
        ):
            value = torch_layout(stored[f"{prefix}_{theirs}"])
            assert state[ours].shape == value.shape
            state[ours].copy_(value)
    for name, weight in named.items():
        weight.data.copy_(torch_layout(stored[name]))

    features = nchw(stored["input"])
    shown: dict[str, Tensor] = {}

    def show(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: shown.update({name: output})

    for name, unit in (("out_entry", head.entry), ("out_row", head.block), ("out_attention_end", head.exit)):
        unit.register_forward_hook(show(name))
    head.bottleneck[0].register_forward_pre_hook(
        lambda module, inputs: shown.update({"output_concat": cat([inputs[0], inputs[1].expand_as(inputs[0])], dim=1)})
    )
    with torch.no_grad():
        fused, branches, *_ = head(features)
    assert branches == {}
    for name, ours in {**shown, "output_bottleneck": fused}.items():
        torch.testing.assert_close(ours, nchw(stored[name]), atol=1e-4, rtol=1e-4)
    assert shown.keys() == {"out_entry", "out_row", "out_attention_end", "output_concat"}
