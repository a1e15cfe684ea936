"""Synthetic scenes: reproducible, valid, and houses that only their row or column identifies."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caaseg.cli import main
from caaseg.data.catalogue import find, open_dataset
from caaseg.data.datasets.scenes import CLUTTER, FIRST_HOUSE, LAMP, Difficulty, Layout, Scenes, draw_layout, paint
from caaseg.data.sample import IGNORE, Sample

seeds = st.integers(0, 2**31)
difficulties = st.sampled_from(list(CLUTTER))
sizes = st.tuples(st.integers(64, 150), st.integers(64, 150))


def fingerprint(sample: Sample) -> str:
    return hashlib.sha256(sample.image.numpy().tobytes() + sample.label.numpy().tobytes()).hexdigest()[:16]


def layout_of(scenes: Scenes, index: int) -> Layout:
    """Return the layout of a train scene, drawn again from its random stream."""
    return draw_layout(np.random.default_rng((scenes.seed, 0, index, 0)), scenes.size, CLUTTER[scenes.difficulty])


def test_scenes_are_the_same_in_every_process_and_version() -> None:
    assert fingerprint(Scenes(seed=3)[7]) == "ef51d28957462060"
    assert fingerprint(Scenes("val", size=(96, 160), difficulty="hard")[0]) == "404b84dcb243a226"


def test_splits_seeds_and_indices_share_no_scene() -> None:
    drawn = [
        Scenes(split, seed=seed, length=8)[index]
        for split in ("train", "val", "test")
        for seed in (0, 1)
        for index in range(8)
    ]
    assert len({fingerprint(sample) for sample in drawn}) == len({sample.name for sample in drawn}) == 48


@given(size=sizes, difficulty=difficulties, seed=seeds)
def test_samples_are_valid_at_every_size(size: tuple[int, int], difficulty: Difficulty, seed: int) -> None:
    image, label, _ = Scenes(size=size, difficulty=difficulty, seed=seed)[0]
    assert image.dtype == label.dtype == torch.uint8
    assert image.shape == (3, *size)
    assert label.shape == size
    found = set(label.flatten().tolist())
    assert found <= {*range(len(Scenes.classes)), IGNORE}
    assert {LAMP, IGNORE} < found
    assert 0 < (label == IGNORE).float().mean() < 0.05


@pytest.mark.parametrize("size", [(300, 500), (720, 960), (1100, 1024)])
def test_large_scenes_have_all_three_regions(size: tuple[int, int]) -> None:
    labels = torch.stack([Scenes(size=size)[index].label for index in range(3)])
    shares = [float((labels == region).float().mean()) for region in range(3)]
    assert min(shares) > 0.1


def test_every_class_has_a_fair_share_of_the_pixels() -> None:
    labels = torch.cat([Scenes()[index].label.flatten() for index in range(100)])
    shares = torch.bincount(labels.long(), minlength=256)[: len(Scenes.classes)] / len(labels)
    assert shares[:3].min() > 0.2  # regions
    assert shares[FIRST_HOUSE:].min() > 0.004  # houses are small, and none is rare
    assert shares[FIRST_HOUSE:].max() < 0.02


@given(size=sizes, difficulty=difficulties, seed=seeds)
def test_exactly_one_distant_lamp_in_its_row_or_column_identifies_each_house(
    size: tuple[int, int], difficulty: Difficulty, seed: int
) -> None:
    scenes = Scenes(size=size, difficulty=difficulty, seed=seed)
    image, label, _ = scenes[0]
    for row, column, _half in layout_of(scenes, 0).houses.tolist():
        along_row = [(row, int(c)) for c in torch.nonzero(label[row] == LAMP)]
        along_column = [(int(r), column) for r in torch.nonzero(label[:, column] == LAMP)]
        assert bool(along_row) != bool(along_column), "a lamp in both, or in none"
        lamps = along_row or along_column
        assert max(a[0] - b[0] + a[1] - b[1] for a in lamps for b in lamps) < min(size) / 8, "more than one lamp"
        distance, side = (abs(lamps[0][1] - column), size[1]) if along_row else (abs(lamps[0][0] - row), size[0])
        assert distance > 0.4 * side
        middle = lamps[len(lamps) // 2]
        color = tuple(image[:, middle[0], middle[1]].tolist())
        assert scenes.palette.index(color) == label[row, column]


@given(seed=seeds, difficulty=difficulties, data=st.data())
def test_only_its_lamp_depends_on_the_class_of_a_house(seed: int, difficulty: Difficulty, data: Any) -> None:
    size, clutter = (96, 96), CLUTTER[difficulty]
    layout = draw_layout(np.random.default_rng(seed), size, clutter)
    others = data.draw(st.lists(st.integers(0, 3), min_size=clutter.houses, max_size=clutter.houses))
    repainted = layout._replace(colors=np.array(others, np.int32))
    image, label = paint(layout, np.random.default_rng(seed), size, clutter.noise)
    other_image, other_label = paint(repainted, np.random.default_rng(seed), size, clutter.noise)
    assert (label[(image != other_image).any(2)] == LAMP).all()
    assert (label[label != other_label] >= FIRST_HOUSE).all()
    assert (label == LAMP).sum() == (other_label == LAMP).sum()


def test_the_most_similar_house_has_the_same_class_only_by_chance() -> None:
    scenes, reach = Scenes(difficulty="easy"), 10
    windows, classes = [], []
    for index in range(300):
        image, label, _ = scenes[index]
        for row, column, _half in layout_of(scenes, index).houses:
            area = (slice(row - reach, row + reach), slice(column - reach, column + reach))
            windows.append(image[:, area[0], area[1]].flatten())
            classes.append(label[row, column])
    features, truth = torch.stack(windows).float(), torch.stack(classes)
    distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
    guessed = truth[distances.argmin(1)]
    assert abs((guessed == truth).float().mean() - 0.25) < 0.06  # 600 houses of four colors: 3.4 standard deviations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, r"scenes: split is 'trian'; expected any of train, val, test"),
        ({"difficulty": "insane"}, r"scenes: difficulty is 'insane'; expected any of easy, medium, hard"),
        ({"size": (63, 128)}, r"scenes: size is 63 x 128; expected at least 64 on each side"),
        ({"length": 0}, r"scenes: length is 0; expected 1 or more"),
        ({"seed": -1}, r"scenes: seed is -1; expected 0 or more"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenes(**options)


def test_the_catalogue_opens_scenes_without_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_dataset("scenes", None, "val", difficulty="hard", size=(64, 80))
    assert fingerprint(opened[3]) == fingerprint(Scenes("val", difficulty="hard", size=(64, 80))[3])
    assert len(opened) == find("scenes").counts["val"]
    for command, message in (
        ("prepare", "scenes has nothing to download; drawn on demand, without files or root"),
        ("check", "scenes has no files to check"),
    ):
        assert main(["data", command, "scenes", "--root", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"caaseg: {message}\n"


def test_an_index_out_of_range_ends_iteration() -> None:
    assert [sample.name for sample in Scenes("val", length=2)] == ["val-0-000000", "val-0-000001"]  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="scenes: index -1; expected 0 to 1"):
        Scenes(length=2)[-1]
