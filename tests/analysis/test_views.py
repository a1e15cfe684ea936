"""What the parts of a model say: branches as the model gives them, gates flattened as the definition has it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caaseg
from caaseg.analysis.views import Flatness, Views, check_studied, flattened, gates_of
from caaseg.attention import ChannelizedAxialAttention
from caaseg.attention.axial import column_weights, row_weights
from caaseg.data.transforms import normalize
from caaseg.models.predictor import Predictor


def build(head: str, **options: Any) -> caaseg.Segmenter:
    torch.manual_seed(0)
    small: dict[str, Any] = {"channels": 16, "key_channels": 4, "gate_width": 8, "gate_layers": 1}
    model = caaseg.create_model(head, backbone="test_resnet", **{"num_classes": 5, **small, **options})
    model(torch.randn(2, 3, 33, 33))  # batch norm statistics that are not the initial ones
    nn.init.normal_(model.classifier.weight)
    return model.eval()


@pytest.mark.parametrize(("column", "row"), [("kept", "kept"), ("level", "kept"), ("kept", "level"), ("even", "even")])
def test_flattened_gates_are_the_means_of_those_the_block_has(column: Flatness, row: Flatness) -> None:
    torch.manual_seed(1)
    block = ChannelizedAxialAttention(6, key_channels=3, value_channels=4, gate_layers=1, gate_width=5).double().eval()
    assert block.column_gate is not None
    assert block.row_gate is not None
    for weights in (*block.column_gate.parameters(), *block.row_gate.parameters()):
        nn.init.normal_(weights, std=5)
    features = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    n, h, w, c = 2, 5, 7, 4
    a_col, a_row = column_weights(block.column_keys(features)), row_weights(block.row_keys(features))
    v = block.values(features)  # (N, C, H, W)
    y = torch.einsum("njim,ncmj->nijc", a_col, v)
    g_col = block.column_gate(y.sum(2) / (h * w))  # (N, H, C)
    r = torch.einsum("nijk,nikc->nijc", a_row, y)
    g_row = block.row_gate((g_col[:, :, None] * r).sum(1) / (h * w))  # (N, W, C), as it is beside the kept column gate
    assert g_col.std(1).max() > 0.01
    assert g_row.std(1).max() > 0.01
    expected = torch.empty(n, c, h, w, dtype=torch.float64)
    for b in range(n):
        for i in range(h):
            for j in range(w):
                for k in range(c):
                    g1 = {"kept": g_col[b, i, k], "level": g_col[b, :, k].mean(), "even": g_col[b].mean()}[column]
                    g2 = {"kept": g_row[b, j, k], "level": g_row[b, :, k].mean(), "even": g_row[b].mean()}[row]
                    expected[b, k, i, j] = g1 * g2 * r[b, i, j, k]
    torch.testing.assert_close(flattened(block, features, column=column, row=row), expected)
    if (column, row) == ("kept", "kept"):
        torch.testing.assert_close(block(features), expected)


@pytest.mark.parametrize("head", ["danet", "axial_se"])
def test_the_views_of_a_dual_attention_are_its_branches_and_itself(head: str) -> None:
    model = build(head)
    images = torch.randint(0, 256, (1, 3, 48, 40), dtype=torch.uint8)
    with torch.inference_mode():
        prediction = model(normalize(images, model.backbone.mean, model.backbone.std))
    views = Views(model)
    scores = Predictor(views).scores(images).chunk(len(views.names), dim=1)
    for name, found in zip(views.names[:-1], scores[:-1], strict=True):
        torch.testing.assert_close(found, prediction.branches[name])
    torch.testing.assert_close(scores[-1], prediction.logits)


class Sloping(nn.Module):
    """A gate that surely differs from place to place and from channel to channel."""

    def forward(self, pooled: Tensor) -> Tensor:
        positions, channels = (torch.linspace(0.2, 0.9, length) for length in pooled.shape[1:])
        return (positions[:, None] * channels).expand_as(pooled)


@pytest.mark.parametrize("decoder", [False, True])
def test_the_last_view_of_caa_is_the_model_and_the_others_are_not(decoder: bool) -> None:
    model = build("caa", decoder=decoder)
    model.head.block.column_gate, model.head.block.row_gate = Sloping(), Sloping()  # type: ignore[union-attr]
    images = torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8)
    views = Views(model)
    *others, whole = Predictor(views).scores(images).chunk(len(views.names), dim=1)
    torch.testing.assert_close(whole, Predictor(model).scores(images))
    assert len(others) == len(model.head.views) - 1
    for number, other in enumerate(others):
        assert (other - whole).abs().max() > 1e-4, model.head.views[number]
    torch.testing.assert_close(Predictor(model).scores(images), whole)  # nothing of the study stays in the model


def test_gates_of_an_image_are_those_of_the_block() -> None:
    model = build("caa")
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    gates = gates_of(model, image)
    with torch.inference_mode():
        coarse, _ = model.backbone(normalize(image[None], model.backbone.mean, model.backbone.std))
        maps = model.head.block.explain(model.head.entry(coarse))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(gates.column[None], maps.column_gate)
    torch.testing.assert_close(gates.row[None], maps.row_gate)
    assert gates.column.shape == (4, 16)
    assert gates.row.shape == (6, 16)


@pytest.mark.parametrize("head", ["fcn", "axial", "self_attention", "channelized_self_attention"])
def test_a_head_with_nothing_to_study_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match=rf"head is {head}, .* expected axial_se, danet \(branches\) or caa \(gates\)"):
        check_studied(build(head))
