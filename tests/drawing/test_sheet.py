"""Overlays and contact sheets."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.cli import main
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE
from caaseg.drawing.overlays import overlay
from caaseg.drawing.sheet import draw_sheet
from caaseg.reports.figures import save

CAMVID = Path(__file__).parents[2].parent / "shared" / "data" / "camvid"


def test_an_overlay_blends_image_and_class_colors() -> None:
    image = np.full((1, 3, 3), 100, np.uint8)
    label = np.array([[0, 1, IGNORE]], np.uint8)
    blended = overlay(image, label, [(200, 0, 0), (0, 0, 50)], opacity=0.5)
    assert blended.tolist() == [[[150, 50, 50], [50, 50, 75], [25, 25, 25]]]


def test_a_sheet_names_its_samples_and_only_the_classes_present() -> None:
    scenes = Scenes(length=3, size=(64, 64))
    samples = [scenes[index] for index in range(3)]
    samples[1].label[samples[1].label == 0] = 1
    figure = draw_sheet([samples[1]], scenes.classes, scenes.palette, "one")
    present = {scenes.classes[k] for k in set(samples[1].label.flatten().tolist()) - {IGNORE}}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {*present, "ignored"}
    assert "meadow" not in present

    figure = draw_sheet(samples, scenes.classes, scenes.palette, "three")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == [sample.name for sample in samples]
    assert sum(len(axes.images) for axes in figure.axes) == 6
    assert figure.get_suptitle() == "three"


def test_names_with_dollar_signs_are_not_parsed_as_math(tmp_path: Path) -> None:
    sample = Scenes(length=1, size=(64, 64))[0]._replace(name="shot_$1_$2_")
    classes = ["cost $x_$ y"] * 10
    save(draw_sheet([sample], classes, [(k, k, k) for k in range(10)], "one $ and $_ another"), tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def test_scenes_are_shown_without_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "sheet.png"
    assert main(["data", "show", "scenes", "--split", "val", "--samples", "3", "--out", str(out)]) == 0
    assert f"sheet: {out}" in capsys.readouterr().out
    with Image.open(out) as sheet:
        assert sheet.width > 1000
        assert len(np.unique(np.array(sheet.convert("RGB")).reshape(-1, 3), axis=0)) > 1000


@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")
def test_camvid_is_shown(tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    assert main(["data", "show", "camvid", "--root", str(CAMVID), "--samples", "2", "--out", str(out)]) == 0
    assert out.stat().st_size > 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["camvid", "--out", "x.png"], "camvid needs the directory of its files; give it as --root"),
        (["scenes", "--out", "x.txt"], "--out is 'x.txt'; expected a file name that ends in .png, .svg or .pdf"),
        (["scenes", "--out", "x.png", "--samples", "0"], "--samples is 0; expected greater than or equal to 1"),
        (["scenes", "--out", "x.png", "--split", "all"], "scenes: split is 'all'; expected any of train, val, test"),
    ],
)
def test_bad_options_end_with_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", *arguments]) == 2
    assert capsys.readouterr().err == f"caaseg: {message}\n"
    assert not Path("x.png").exists()
