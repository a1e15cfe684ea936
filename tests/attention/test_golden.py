"""Golden tests: golden/*.npz hold outputs of the authors' published code for stored inputs and weights.

Tolerances: 1e-4 for outputs; 1e-4 of the largest entry of the array for gradients.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from caaseg.attention import (
    ChannelAttention,
    ChannelizedAxialAttention,
    Implementation,
    PositionAttention,
    channelized_axial_attention,
    self_attention,
)
from tests.attention.golden import GOLDEN, load, nchw, parameters, projections, torch_layout

BLOCKS = sorted(path.name for path in GOLDEN.glob("caa_axial_block_*.npz"))
IMPLEMENTATIONS: list[tuple[Implementation, int]] = [
    ("factorised", 1),
    ("grouped", 1),
    ("grouped", 3),
    ("grouped", 4),
    ("grouped", 16),
    ("loop", 1),
]


def build(stored: dict[str, Any], implementation: Implementation, groups: int) -> ChannelizedAxialAttention:
    block = ChannelizedAxialAttention(
        stored["input"].shape[-1],
        key_channels=int(stored["guided_filters"]),
        value_channels=int(stored["filters"]),
        gate_layers=int(stored["hidden_layers_count"]),
        gate_width=int(int(stored["filters"]) * float(stored["hidden_layer_ratio"])),
        channelize=bool(stored["use_channel_attention"]),
        implementation=implementation,
        groups=groups,
    )
    for name, weight in parameters(block).items():
        value = torch_layout(stored[name])
        assert value.shape == weight.shape, name
        weight.data.copy_(value)
    for prefix, module in projections(block).items():
        buffers = dict(module.named_buffers())
        buffers["1.running_mean"].copy_(torch.from_numpy(stored[f"{prefix}_bn_moving_mean"]))
        buffers["1.running_var"].copy_(torch.from_numpy(stored[f"{prefix}_bn_moving_variance"]))
    return block.eval()


def test_all_golden_files_exist() -> None:
    assert len(BLOCKS) == 5
    assert {"caa_head.npz", "self_attention.npz", "danet_pam_cam.npz"} < {path.name for path in GOLDEN.glob("*.npz")}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("implementation", "groups"), IMPLEMENTATIONS)
def test_the_block_gives_the_authors_numbers_forward_and_backward(
    name: str, implementation: Implementation, groups: int
) -> None:
    stored = load(name)
    block = build(stored, implementation, groups)
    features = nchw(stored["input"]).requires_grad_()
    output = channelized_axial_attention(
        block.column_keys(features),
        block.row_keys(features),
        block.values(features),
        block.column_gate,
        block.row_gate,
        implementation=implementation,
        groups=groups,
    )
    torch.testing.assert_close(output, nchw(stored["out_row"]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(block(features), output, atol=1e-6, rtol=1e-5)

    named = parameters(block)
    gradients = torch.autograd.grad(output, [features, *named.values()], nchw(stored["cotangent"]))
    expected = [nchw(stored["grad_input"]), *(torch_layout(stored[f"grad_{key}"]) for key in named)]
    for key, ours, theirs in zip(["input", *named], gradients, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), key


@pytest.mark.parametrize("name", BLOCKS)
def test_explain_shows_the_authors_attention_and_gates(name: str) -> None:
    stored = load(name)
    block = build(stored, "auto", 16)
    with torch.no_grad():
        maps = block.explain(nchw(stored["input"]))
    shown = {"col_attention": maps.column_weights, "row_attention": maps.row_weights}
    if bool(stored["use_channel_attention"]):
        assert maps.column_gate is not None
        assert maps.row_gate is not None
        shown |= {"col_gate": maps.column_gate, "row_gate": maps.row_gate}
    else:
        assert maps.column_gate is None
        assert maps.row_gate is None
    for key, ours in shown.items():
        torch.testing.assert_close(ours, torch.from_numpy(stored[key]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(maps.output, nchw(stored["out_row"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("implementation", "groups"), IMPLEMENTATIONS)
def test_column_attention_gives_the_authors_column_output(implementation: Implementation, groups: int) -> None:
    stored = load("caa_axial_block_rect.npz")
    block = build(stored, implementation, groups)
    features = nchw(stored["input"])
    values = block.values(features)
    torch.testing.assert_close(values, nchw(stored["value"]), atol=1e-4, rtol=1e-4)
    # With such large keys every pixel attends only to itself, so row attention is the identity.
    identity_keys = torch.eye(12)[:, None, :].expand(12, 5, 12)[None].expand(2, 12, 5, 12) * 30
    output = channelized_axial_attention(
        block.column_keys(features),
        identity_keys,
        values,
        block.column_gate,
        None,
        implementation=implementation,
        groups=groups,
    )
    torch.testing.assert_close(output, nchw(stored["out_col"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", ["output", "output_with_sqrt_scale"])
def test_self_attention_gives_the_authors_numbers(key: str) -> None:
    stored = load("self_attention.npz")
    features = nchw(stored["input"])
    q, k, v = (
        nn.functional.conv2d(
            features, torch_layout(stored[f"{part}_conv_kernel"]), torch.from_numpy(stored[f"{part}_conv_bias"])
        )
        for part in ("query", "key", "value")
    )
    if key == "output_with_sqrt_scale":
        q = q / float(stored["guided_filters"]) ** 0.5
    torch.testing.assert_close(self_attention(q, k, v), nchw(stored[key]), atol=1e-4, rtol=1e-4)


def test_danet_attentions_give_their_authors_numbers() -> None:
    numbers = {key: value for key, value in load("danet_pam_cam.npz").items() if value.dtype == np.float32}
    stored = {key: torch.from_numpy(value) for key, value in numbers.items()}
    position, channel = PositionAttention(32), ChannelAttention()
    state = {"scale": stored["pam_gamma"].reshape(())}
    for ours, theirs in (("queries", "query"), ("keys", "key"), ("values", "value")):
        state |= {f"{ours}.{kind}": stored[f"pam_{theirs}_conv_{kind}"] for kind in ("weight", "bias")}
    position.load_state_dict(state)
    channel.load_state_dict({"scale": stored["cam_gamma"].reshape(())})
    for module, key in ((position, "pam_output"), (channel, "cam_output")):
        output = module(stored["input"])
        torch.testing.assert_close(output, stored[key], atol=1e-4, rtol=1e-4)
        maps = module.explain(stored["input"])
        torch.testing.assert_close(maps.output, output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(maps.weights.sum(-1), torch.ones(maps.weights.shape[:-1]))
