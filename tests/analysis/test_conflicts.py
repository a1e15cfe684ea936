"""Conflict study: views, averaged gates, counts against a plain loop, worst images, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from caaseg.analysis.conflicts import (
    ConflictCounts,
    GateMean,
    Views,
    average_gates,
    check_head,
    image_gates,
    mark_conflicts,
    study_conflicts,
)
from caaseg.attention import ChannelizedAxialAttention
from caaseg.attention.axial import column_weights, row_weights
from caaseg.cli import main
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE
from caaseg.data.transforms import normalize
from caaseg.models.heads import HEADS, head_class
from caaseg.models.predictor import Predictor
from tests.analysis.study_models import build_model, save_model
from tests.data.trees import folder_of_scenes


@given(
    n=st.integers(1, 3),
    v=st.integers(2, 4),
    k=st.integers(1, 4),
    h=st.integers(1, 5),
    w=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_counts_equal_a_plain_loop(n: int, v: int, k: int, h: int, w: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    views = torch.randint(0, k, (n, v, h, w), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, k, (n, h, w), generator=rng, dtype=torch.uint8)
    labels[torch.rand(n, h, w, generator=rng) < 0.3] = IGNORE
    expected: dict[str, list[int]] = {kind: [0] * k for kind in ("labeled", "lost", "won", "disagree")}
    lost_from, won_over = [[0] * k for _ in range(v - 1)], [[0] * k for _ in range(v - 1)]
    for image in range(n):
        for i in range(h):
            for j in range(w):
                label = int(labels[image, i, j])
                if label == IGNORE:
                    continue
                *parts, whole = (int(view[i, j]) for view in views[image])
                expected["labeled"][label] += 1
                expected["lost"][label] += any(part == label for part in parts) and whole != label
                expected["won"][label] += whole == label and all(part != label for part in parts)
                expected["disagree"][label] += len(set(parts)) > 1
                for b, part in enumerate(parts):
                    lost_from[b][label] += part == label and whole != label
                    won_over[b][label] += part != label and whole == label
    counts = ConflictCounts(v, k)
    counts.update(views[:1], labels[:1])
    if n > 1:
        counts.update(views[1:], labels[1:])
    assert {kind: getattr(counts, kind).tolist() for kind in expected} == expected
    assert counts.lost_from.tolist() == lost_from
    assert counts.won_over.tolist() == won_over


def test_conflicts_of_four_pixels_by_hand() -> None:
    label = torch.tensor([[0, 1, 1, IGNORE]])
    spatial = torch.tensor([[0, 0, 1, 0]])
    channel = torch.tensor([[0, 0, 0, 1]])
    fused = torch.tensor([[1, 1, 1, 0]])
    lost, won, disagree = mark_conflicts(torch.stack([spatial, channel, fused]), label)
    assert lost.tolist() == [[True, False, False, False]]  # both branches are right, the fused prediction is wrong
    assert won.tolist() == [[False, True, False, False]]
    assert disagree.tolist() == [[False, False, True, False]]  # the last pixel is ignored


def test_the_worst_image_of_each_section_is_returned_and_all_are_ranked() -> None:
    scenes = Scenes("val", length=7, size=(64, 64))
    done: list[int] = []
    found = study_conflicts(build_model("danet", num_classes=8), scenes, num_shown=2, progress=done.append)
    assert done == list(range(1, 8))
    assert sum(one.labeled for one in found.images) == int(found.counts.labeled.sum())
    assert sum(one.lost for one in found.images) == int(found.counts.lost.sum()) > 0
    shares = [one.lost_share for one in found.images]
    assert shares == sorted(shares, reverse=True)
    names = [scenes[k].name for k in range(7)]
    ranks = {one.name: rank for rank, one in enumerate(found.images)}
    halves = (min(names[:4], key=ranks.__getitem__), min(names[4:], key=ranks.__getitem__))
    assert [shown.counts.name for shown in found.worst] == sorted(halves, key=ranks.__getitem__)
    for shown in found.worst:
        lost, won, _ = mark_conflicts(shown.views, shown.label)
        assert (int(lost.sum()), int(won.sum())) == (shown.counts.lost, shown.counts.won)


@pytest.mark.parametrize("head", [name for name in HEADS if head_class(name).views])
def test_the_command_writes_a_page_figures_and_numbers(
    head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, numbers = save_model(head, tmp_path / "model"), tmp_path / "out", tmp_path / "numbers.json"
    folder_of_scenes(tmp_path / "data", 5, (64, 64))
    arguments = ["--images", "1", "--dataset", "folder", "--root", str(tmp_path / "data"), "--workers", "0"]
    assert main(["conflicts", model, *arguments, "--out", str(out), "--json", str(numbers)]) == 0
    output = capsys.readouterr().out
    found = json.loads(numbers.read_text())
    assert f"{found['all']['lost']:.2%} of the labeled pixels are lost" in output
    figures = {"conflicts.png", "gates.png"} if head == "caa" else {"conflicts.png"}
    assert {path.name for path in out.iterdir()} == {"conflicts.html", *figures}
    page = (out / "conflicts.html").read_text()
    assert page.count("<figure>") == len(head_class(head).views) + 3  # image, ground truth, views, lost and won
    assert "http" not in page
    assert ("Channel gates" in page) == (head == "caa")
    assert [view["name"] for view in found["views"]] == list(head_class(head).views)
    assert found["all"]["lost_pixels"] == sum(one["lost"] for one in found["images"])
    assert found["all"]["lost_pixels"] == sum(one["lost_pixels"] for one in found["classes"])
    assert len(found["images"]) == 5
    assert found["head"] == head


def test_bad_input_gives_exit_code_2_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dataset", "scenes", "--out", str(tmp_path / "out")]
    assert main(["conflicts", save_model("fcn", tmp_path / "fcn"), *arguments]) == 2
    assert "the model's head is fcn" in capsys.readouterr().err
    danet = save_model("danet", tmp_path / "danet")
    assert main(["conflicts", danet, *arguments, "--images", "0"]) == 2
    assert "--images is 0; expected greater than or equal to 1" in capsys.readouterr().err
    assert main(["conflicts", danet, "--dataset", "scenes", "--out", f"{danet}/config.json"]) == 2
    assert "which is a file; expected a new or existing directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_split_without_labels_is_rejected() -> None:
    class Unlabeled(Scenes):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return sample._replace(label=torch.full_like(sample.label, IGNORE))

    with pytest.raises(ValueError, match="no pixel of this split is labeled"):
        study_conflicts(build_model("danet", num_classes=8), Unlabeled("val", length=1, size=(64, 64)))


@pytest.mark.parametrize(
    ("column", "row"), [("none", "none"), ("positions", "none"), ("none", "positions"), ("all", "all")]
)
def test_averaged_gates_are_means_of_the_gates_of_the_block(column: GateMean, row: GateMean) -> None:
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
    g_row = block.row_gate((g_col[:, :, None] * r).sum(1) / (h * w))  # (N, W, C), with the original column gate
    assert g_col.std(1).max() > 0.01
    assert g_row.std(1).max() > 0.01
    expected = torch.empty(n, c, h, w, dtype=torch.float64)
    for b in range(n):
        for i in range(h):
            for j in range(w):
                for k in range(c):
                    g1 = {"none": g_col[b, i, k], "positions": g_col[b, :, k].mean(), "all": g_col[b].mean()}[column]
                    g2 = {"none": g_row[b, j, k], "positions": g_row[b, :, k].mean(), "all": g_row[b].mean()}[row]
                    expected[b, k, i, j] = g1 * g2 * r[b, i, j, k]
    torch.testing.assert_close(average_gates(block, features, column=column, row=row), expected)
    if (column, row) == ("none", "none"):
        torch.testing.assert_close(block(features), expected)


@pytest.mark.parametrize("head", ["danet", "axial_se"])
def test_the_views_of_a_dual_attention_are_its_branches_and_its_prediction(head: str) -> None:
    model = build_model(head)
    images = torch.randint(0, 256, (1, 3, 48, 40), dtype=torch.uint8)
    with torch.inference_mode():
        prediction = model(normalize(images, model.backbone.mean, model.backbone.std))
    views = Views(model)
    scores = Predictor(views).scores(images).chunk(len(views.names), dim=1)
    for name, found in zip(views.names[:-1], scores[:-1], strict=True):
        torch.testing.assert_close(found, prediction.branches[name])
    torch.testing.assert_close(scores[-1], prediction.logits)


class Sloping(nn.Module):
    """A gate that differs between positions and between channels."""

    def forward(self, pooled: Tensor) -> Tensor:
        positions, channels = (torch.linspace(0.2, 0.9, length) for length in pooled.shape[1:])
        return (positions[:, None] * channels).expand_as(pooled)


@pytest.mark.parametrize("decoder", [False, True])
def test_the_last_view_of_caa_is_the_model_and_the_others_are_not(decoder: bool) -> None:
    model = build_model("caa", decoder=decoder)
    model.head.block.column_gate, model.head.block.row_gate = Sloping(), Sloping()  # type: ignore[union-attr]
    images = torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8)
    views = Views(model)
    *others, whole = Predictor(views).scores(images).chunk(len(views.names), dim=1)
    torch.testing.assert_close(whole, Predictor(model).scores(images))
    assert len(others) == len(model.head.views) - 1
    for number, other in enumerate(others):
        assert (other - whole).abs().max() > 1e-4, model.head.views[number]
    torch.testing.assert_close(Predictor(model).scores(images), whole)  # the hooks are removed


def test_image_gates_are_the_gates_of_the_block() -> None:
    model = build_model("caa")
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    gates = image_gates(model, image)
    with torch.inference_mode():
        coarse = model.backbone(normalize(image[None], model.backbone.mean, model.backbone.std)).coarse
        maps = model.head.block.explain(model.head.entry(coarse))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(gates.column[None], maps.column_gate)
    torch.testing.assert_close(gates.row[None], maps.row_gate)
    assert gates.column.shape == (4, 16)
    assert gates.row.shape == (6, 16)


@pytest.mark.parametrize("head", ["fcn", "axial", "self_attention", "channelized_self_attention"])
def test_a_head_with_nothing_to_study_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match=rf"head is {head}, .* expected axial_se, danet \(branches\) or caa \(gates\)"):
        check_head(build_model(head))
