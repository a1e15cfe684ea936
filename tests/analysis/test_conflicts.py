"""Lost and won pixels are those of a plain loop; the worst images are found; the command from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caaseg.analysis.conflicts import ConflictCounts, marks, study_conflicts
from caaseg.analysis.views import VIEWS
from caaseg.cli import main
from caaseg.data.catalogue import DATASETS
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE
from tests.analysis.test_views import build


@given(
    n=st.integers(1, 3),
    v=st.integers(2, 4),
    k=st.integers(1, 4),
    h=st.integers(1, 5),
    w=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_counts_are_those_of_a_plain_loop(n: int, v: int, k: int, h: int, w: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    views = torch.randint(0, k, (n, v, h, w), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, k, (n, h, w), generator=rng, dtype=torch.uint8)
    labels[torch.rand(n, h, w, generator=rng) < 0.3] = IGNORE
    expected: dict[str, list[int]] = {kind: [0] * k for kind in ("labelled", "lost", "won", "disagree")}
    lost_from, won_over = [[0] * k for _ in range(v - 1)], [[0] * k for _ in range(v - 1)]
    for image in range(n):
        for i in range(h):
            for j in range(w):
                label = int(labels[image, i, j])
                if label == IGNORE:
                    continue
                *parts, whole = (int(view[i, j]) for view in views[image])
                expected["labelled"][label] += 1
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


def test_four_pixels_by_hand() -> None:
    label = torch.tensor([[0, 1, 1, IGNORE]])
    spatial = torch.tensor([[0, 0, 1, 0]])
    channel = torch.tensor([[0, 0, 0, 1]])
    fused = torch.tensor([[1, 1, 1, 0]])
    lost, won, disagree = marks(torch.stack([spatial, channel, fused]), label)
    assert lost.tolist() == [[True, False, False, False]]  # both branches have it right
    assert won.tolist() == [[False, True, False, False]]
    assert disagree.tolist() == [[False, False, True, False]]  # one is right, as the fusion; the last is ignored


def test_the_worst_image_of_each_stretch_is_kept_and_all_are_ranked() -> None:
    scenes = Scenes("val", length=7, size=(64, 64))
    told: list[int] = []
    found = study_conflicts(build("danet", num_classes=8), scenes, number=2, seen=told.append)
    assert told == list(range(1, 8))
    assert sum(one.labelled for one in found.images) == int(found.counts.labelled.sum())
    assert sum(one.lost for one in found.images) == int(found.counts.lost.sum()) > 0
    shares = [one.lost_share for one in found.images]
    assert shares == sorted(shares, reverse=True)
    names = [scenes[k].name for k in range(7)]
    ranks = {one.name: rank for rank, one in enumerate(found.images)}
    halves = (min(names[:4], key=ranks.__getitem__), min(names[4:], key=ranks.__getitem__))
    assert [kept.counts.name for kept in found.worst] == sorted(halves, key=ranks.__getitem__)
    for kept in found.worst:
        lost, won, _ = marks(kept.views, kept.label)
        assert (int(lost.sum()), int(won.sum())) == (kept.counts.lost, kept.counts.won)


def saved(head: str, folder: Path, **options: Any) -> str:
    build(head, num_classes=8, classes=Scenes.classes, **options).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenes of five images, so that a command is done in a moment."""
    few = replace(DATASETS["scenes"], open=lambda _, split: Scenes(split, length=5, size=(64, 64)))
    monkeypatch.setitem(DATASETS, "scenes", few)


@pytest.mark.usefixtures("few_scenes")
@pytest.mark.parametrize("head", list(VIEWS))
def test_the_command_writes_a_page_figures_and_numbers(
    head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, numbers = saved(head, tmp_path / "model"), tmp_path / "out", tmp_path / "numbers.json"
    words = ["--dataset", "scenes", "--out", str(out), "--images", "2", "--workers", "0", "--json", str(numbers)]
    assert main(["conflicts", model, *words]) == 0
    said = capsys.readouterr().out
    found = json.loads(numbers.read_text())
    assert f"{found['all']['lost']:.2%} of the labelled pixels are lost" in said
    figures = {"conflicts.png", "gates.png"} if head == "caa" else {"conflicts.png"}
    assert {path.name for path in out.iterdir()} == {"conflicts.html", *figures}
    page = (out / "conflicts.html").read_text()
    assert page.count("<figure>") == 2 * (len(VIEWS[head]) + 3)  # of two images: itself, truth, views, lost and won
    assert "http" not in page
    assert ("The gates" in page) == (head == "caa")
    assert [view["name"] for view in found["views"]] == list(VIEWS[head])
    assert found["all"]["lost_pixels"] == sum(one["lost"] for one in found["images"])
    assert found["all"]["lost_pixels"] == sum(one["lost_pixels"] for one in found["classes"])
    assert len(found["images"]) == 5
    assert found["head"] == head


@pytest.mark.usefixtures("few_scenes")
def test_what_cannot_be_studied_is_said_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dataset", "scenes", "--out", str(tmp_path / "out")]
    assert main(["conflicts", saved("fcn", tmp_path / "fcn"), *words]) == 2
    assert "the model's head is fcn" in capsys.readouterr().err
    danet = saved("danet", tmp_path / "danet")
    assert main(["conflicts", danet, *words, "--images", "0"]) == 2
    assert "--images is 0; expected an integer of 1 or more" in capsys.readouterr().err
    assert main(["conflicts", danet, "--dataset", "scenes", "--out", f"{danet}/config.json"]) == 2
    assert "which is a file; expected a new or existing directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_split_without_labels_has_nothing_to_tell() -> None:
    class Unlabelled(Scenes):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return sample._replace(label=torch.full_like(sample.label, IGNORE))

    with pytest.raises(ValueError, match="no pixel of this split is labelled"):
        study_conflicts(build("danet", num_classes=8), Unlabelled("val", length=1, size=(64, 64)))
