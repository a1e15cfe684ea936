"""Legends of saved figures and overlays have the colors of the classes, and a background class is transparent."""

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.datasets.camvid import CLASSES as CAMVID
from caaseg.data.palette import distinct_colors
from caaseg.data.sample import IGNORE, Color, Sample
from caaseg.drawing.legend import draw_legend
from caaseg.drawing.overlays import background_class, class_legend, overlay
from caaseg.drawing.panels import Row, draw_panels, label_panel
from caaseg.drawing.sheet import draw_sheet
from caaseg.models.result import Result
from caaseg.reports.figures import save

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def gray(height: int = 40, width: int = 60) -> torch.Tensor:
    return torch.full((3, height, width), 120, dtype=torch.uint8)


def stripes(number: int) -> torch.Tensor:
    """Labels of all classes, side by side."""
    return (torch.arange(60) * number // 60).byte().repeat(40, 1)


def colors_of_legend(figure: Figure, path: Path) -> dict[str, Color]:
    """Save a figure, and return the color in the middle of each swatch by its name, from the file."""
    save(figure, path)
    figure.set_dpi(110)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    with Image.open(path) as image:
        assert image.mode in ("RGB", "RGBA")
        pixels = np.array(image.convert("RGB"))
    found: dict[str, Color] = {}
    for legend in figure.legends:
        for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=True):
            box = patch.get_window_extent()
            row, column = len(pixels) - round((box.y0 + box.y1) / 2), round((box.x0 + box.x1) / 2)
            red, green, blue = pixels[row, column].tolist()
            found[text.get_text()] = (red, green, blue)
    return found


@pytest.mark.parametrize("number", [3, 11, 20])
def test_legends_of_saved_figures_have_the_colors_of_the_classes(number: int, tmp_path: Path) -> None:
    classes, palette = [f"class {k}" for k in range(number)], distinct_colors(number)
    labels = stripes(number)
    expected = dict(zip(classes, palette, strict=True))
    rows = [Row("caption", [label_panel(gray(), labels, palette)])]
    figure = draw_panels(rows, ["labels"], classes=class_legend([labels], classes, palette))
    assert colors_of_legend(figure, tmp_path / "panels.png") == expected
    sheet = draw_sheet([Sample(gray(), labels, "name")], classes, palette, "title")
    assert colors_of_legend(sheet, tmp_path / "sheet.png") == expected


def test_the_legend_of_a_result_has_the_colors_of_the_classes(tmp_path: Path) -> None:
    classes, palette = ("background", "road", "tree"), distinct_colors(3)
    labels = stripes(3).repeat(4, 4).numpy()
    result = Result(labels, classes, palette, gray(160, 240).permute(1, 2, 0).numpy())
    result.overlay(legend=True).save(tmp_path / "overlay.png")
    with Image.open(tmp_path / "overlay.png") as image:
        legend = np.array(image)[:, 240:]
    for name, color in zip(classes[1:], palette[1:], strict=True):
        assert (legend == color).all(-1).sum() > 9, name
    assert not (legend == palette[0]).all(-1).any()  # an empty square: the background is transparent


def test_a_legend_of_many_classes_has_several_columns() -> None:
    entries = [(f"class {k}", color) for k, color in enumerate(distinct_colors(60))]
    legend = np.array(draw_legend(entries, 240))
    assert legend.shape[0] == 240
    for name, color in entries:
        assert (legend == color).all(-1).sum() >= 49, name


def test_the_background_class_is_transparent_and_not_in_the_legend() -> None:
    classes, palette = ("Road", "Background", "tree"), distinct_colors(3)
    background = background_class(classes)
    assert background == 1
    assert background_class(("road", "backgrounds")) is background_class(None) is None
    image: NDArray[np.uint8] = gray().permute(1, 2, 0).numpy()
    labels = stripes(3).numpy()
    labels[0] = IGNORE
    drawn = overlay(image, labels, palette, background=background)
    assert (drawn[labels == 1] == 120).all()
    assert (drawn[labels == 0] != 120).any()
    assert (drawn[labels == IGNORE] < 120).all()
    names = [name for name, _ in class_legend([torch.from_numpy(labels)], classes, palette)]
    assert names == ["Road", "tree", "ignored"]


@pytest.mark.parametrize("name", ["conflicts.png", "camvid_best_worst.png"])
def test_legends_of_the_documentation_have_the_colors_of_the_classes(name: str) -> None:
    with Image.open(FIGURES / name) as image:
        assert image.mode in ("RGB", "RGBA"), "a palette of 256 colors changes the colors of classes"
        pixels = np.array(image.convert("RGB"))
    for class_name, color in zip(CAMVID.names, CAMVID.palette, strict=True):
        assert (pixels == color).all(-1).sum() > 50, class_name
