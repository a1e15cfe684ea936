"""Comparison of models: boxes, ranking of images, names, figure, and the command."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from caaseg.analysis.compare import PIXEL_COST, compare_models, differing_pixels, find_boxes
from caaseg.cli import main
from caaseg.config import ModelConfig
from caaseg.data.catalogue import ConcatSplits
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE, Sample
from caaseg.drawing.panels import Box
from caaseg.errors import CaasegError
from caaseg.reports.compare import draw_comparison, model_names
from tests.analysis.study_models import build_model, save_model
from tests.data.trees import folder_of_scenes


def inside(box: Box, mask: torch.Tensor) -> torch.Tensor:
    return mask[box.top : box.bottom, box.left : box.right]


def test_pixels_differ_if_labeled_and_not_predicted_equally_by_all_models() -> None:
    predictions = torch.tensor([[[0, 1, 1, 0]], [[0, 1, 2, 1]], [[0, 2, 1, 1]]])
    assert differing_pixels(predictions, torch.tensor([[0, 0, 0, IGNORE]])).tolist() == [[False, True, True, False]]


def test_two_regions_get_one_box_each() -> None:
    mask = torch.zeros(160, 320, dtype=torch.bool)
    mask[20:60, 30:110] = True
    mask[100:130, 200:260] = True
    assert find_boxes(mask) == [Box(20, 30, 60, 110), Box(100, 200, 130, 260)]
    assert find_boxes(mask, max_boxes=1) == [Box(20, 30, 60, 110)]


def test_an_empty_mask_has_no_box_and_a_single_pixel_has_one() -> None:
    mask = torch.zeros(90, 120, dtype=torch.bool)
    assert find_boxes(mask) == []
    mask[41, 77] = True
    [box] = find_boxes(mask)
    assert inside(box, mask).any()
    assert (box.bottom - box.top, box.right - box.left) == (8, 8)


@given(height=st.integers(1, 80), width=st.integers(1, 80), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_boxes_contain_pixels_of_the_mask_and_do_not_overlap(height: int, width: int, share: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 1, 1 + height // 9, 1 + width // 9, generator=rng)
    mask = torch.nn.functional.interpolate(coarse, (height, width))[0, 0] < share  # blocks, as in predictions
    found = find_boxes(mask)
    assert len(found) <= 3
    assert bool(found) == bool(mask.any())
    coverage = torch.zeros(height, width, dtype=torch.int64)
    for box in found:
        assert 0 <= box.top < box.bottom <= height
        assert 0 <= box.left < box.right <= width
        assert inside(box, mask).any()
        coverage[box.top : box.bottom, box.left : box.right] += 1
    assert coverage.max() <= 1


def test_the_first_box_gains_as_much_as_any_rectangle() -> None:
    rng = torch.Generator().manual_seed(3)
    for _ in range(10):
        mask = torch.rand(8, 9, generator=rng) < 0.3
        best = max(
            float(inside(Box(t, x, b, y), mask.double() - PIXEL_COST).sum())
            for t in range(8)
            for b in range(t + 2, min(8, t + 4) + 1)
            for x in range(9)
            for y in range(x + 2, min(9, x + 4) + 1)
        )
        first = find_boxes(mask, grid=9)[0]  # one pixel per cell
        assert float(inside(first, mask.double() - PIXEL_COST).sum()) == pytest.approx(best)


def test_images_with_the_largest_differences_are_drawn_with_their_boxes() -> None:
    scenes = Scenes("val", length=5, size=(64, 64))
    models = [build_model(head, num_classes=8) for head in ("fcn", "danet")]
    found = compare_models(models, scenes, images=2)
    shares = [one.share for one in found.images]
    assert shares == sorted(shares, reverse=True)
    names = [scenes[k].name for k in range(5)]
    ranks = {one.name: rank for rank, one in enumerate(found.images)}
    halves = (min(names[:3], key=ranks.__getitem__), min(names[3:], key=ranks.__getitem__))
    assert [one.counts.name for one in found.shown] == sorted(halves, key=ranks.__getitem__)
    for one in found.shown:
        differ = differing_pixels(one.predictions, one.label)
        assert (int(differ.sum()), int((one.label != IGNORE).sum())) == (one.counts.differing, one.counts.labeled)
        right = tuple(int(((p == one.label) & differ).sum()) for p in one.predictions)
        assert right == one.counts.right
        assert all(inside(box, differ).float().mean() > PIXEL_COST for box in one.boxes)
    figure = draw_comparison(found, ["fcn", "danet"], scenes.classes, scenes.palette)
    assert [axes.get_title() for axes in figure.axes[:4]] == ["image", "ground truth", "fcn", "danet"]
    for axes, one in zip(figure.axes, [row for row in found.shown for _ in range(4)], strict=True):
        assert len(axes.patches) == len(one.boxes) > 0
        for frame, box in zip(axes.patches, one.boxes, strict=True):
            left, top = frame.get_xy()  # type: ignore[attr-defined]
            assert (left, top) == pytest.approx((box.left, box.top), abs=1)


def test_images_chosen_by_name_are_drawn_in_their_order_and_all_are_counted() -> None:
    scenes = Scenes("val", length=3, size=(64, 64))
    models = [build_model(head, num_classes=8) for head in ("fcn", "axial")]
    chosen = [scenes[2].name, scenes[0].name]
    found = compare_models(models, scenes, images=[*chosen, chosen[0]])
    assert [one.counts.name for one in found.shown] == chosen
    by_difference = compare_models(models, scenes, images=1)
    assert found.images == by_difference.images
    with pytest.raises(CaasegError, match=f"--images has 'val'; .* the nearest are {chosen[0]}, "):
        compare_models(models, ConcatSplits([scenes]), images=["val", *chosen])


def test_an_image_without_labels_cannot_be_chosen() -> None:
    class Unlabeled(Scenes):
        def __getitem__(self, index: int) -> Sample:
            image, label, name = super().__getitem__(index)
            return Sample(image, torch.full_like(label, IGNORE), name)

    scenes = Unlabeled("val", length=1, size=(64, 64))
    with pytest.raises(CaasegError, match=f"image {scenes[0].name} has no labeled pixel to compare; leave it out"):
        compare_models([build_model("fcn", num_classes=8)] * 2, scenes, images=[scenes[0].name])


def test_names_tell_models_apart() -> None:
    def configs(*parts: str) -> list[ModelConfig]:
        return [ModelConfig(head=h, backbone=b, num_classes=2) for h, b in (part.split("/") for part in parts)]

    assert model_names(["a", "b"], configs("caa/resnet18", "fcn/resnet18")) == ["caa", "fcn"]
    several = configs("caa/resnet18", "caa/resnet50", "fcn/resnet18")
    assert model_names(["a", "b", "c"], several) == ["caa, resnet18", "caa, resnet50", "fcn, resnet18"]
    same = configs("caa/resnet18", "caa/resnet18")
    assert model_names(["runs/a", "runs/b"], same) == ["a", "b"]
    assert model_names(["x/run", "y/run"], same) == ["x/run", "y/run"]
    assert model_names(["run", "run"], same) == ["run (1)", "run (2)"]


def test_the_command_writes_figure_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [save_model(head, tmp_path / head) for head in ("fcn", "danet", "caa")]
    out, numbers = tmp_path / "compared.png", tmp_path / "numbers.json"
    folder_of_scenes(tmp_path / "data", 5, (64, 64))
    arguments = ["--images", "2", "--dataset", "folder", "--root", str(tmp_path / "data"), "--workers", "0"]
    arguments += ["--out", str(out), "--json", str(numbers)]
    assert main(["compare", *models, *arguments]) == 0
    assert "The models differ on " in capsys.readouterr().out
    with Image.open(out) as drawn:
        assert drawn.width == 1320
    found = json.loads(numbers.read_text())
    assert [(one["name"], one["model"]) for one in found["models"]] == list(
        zip(("fcn", "danet", "caa"), models, strict=True)
    )
    assert found["differing"] == sum(one["differing"] for one in found["images"])
    assert [one["boxes"] is not None for one in found["images"]].count(True) == 2

    arguments[1] = "val-0-000003,val-0-000001"
    assert main(["compare", *models[:2], *arguments]) == 0
    chosen = [one["name"] for one in json.loads(numbers.read_text())["images"] if one["boxes"] is not None]
    assert sorted(chosen) == ["val-0-000001", "val-0-000003"]
    capsys.readouterr()
    arguments[1] = "val-0-00001,val-0-000003"
    assert main(["compare", *models[:2], *arguments]) == 2
    assert capsys.readouterr().err == (
        "caaseg: --images has 'val-0-00001'; expected a number, or names of images of the split; the nearest are "
        "val-0-000001, val-0-000004, val-0-000003\n"
    )


def test_models_of_different_classes_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fcn, out = save_model("fcn", tmp_path / "fcn"), tmp_path / "compared.png"
    arguments = ["--dataset", "scenes", "--out", str(out)]
    assert main(["compare", fcn, *arguments]) == 2
    assert "is the only model; expected two or more" in capsys.readouterr().err
    build_model("fcn", num_classes=5).save_pretrained(tmp_path / "five")
    assert main(["compare", fcn, str(tmp_path / "five"), *arguments]) == 2
    assert (
        f"{tmp_path / 'five'} has 5 classes (without names), but {fcn} has 8 (meadow, water, sand, ...); "
        "compare models with the same classes" in capsys.readouterr().err
    )
    assert main(["compare", fcn, fcn, "--dataset", "scenes", "--out", str(tmp_path / "x.gif")]) == 2
    assert "--out is" in capsys.readouterr().err
    assert not out.exists()
