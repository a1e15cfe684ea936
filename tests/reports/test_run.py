"""Report of a run: contents, escaping and size."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from caaseg.data.sample import Batch, Color
from caaseg.evaluation.best_worst import BestWorstImages
from caaseg.evaluation.evaluate import Evaluation
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.reports.evaluation import heat_map, largest_confusions, row_shares
from caaseg.reports.run import training_seconds, write_run_page
from tests.training.small import small_recipe

ORIGIN = {
    "commit": "0123456789abcdef+changes",
    "hardware": {"device": "CPU", "processor": "a <fast> one", "cores": 2, "threads": 2},
    "versions": {"caaseg": "0.1.0", "torch": "2.13.0", "cuda": None},
}
METRICS = [
    {"step": 10, "loss": 2.0, "lr": 0.01, "images_per_second": 20.0},
    {"step": 20, "loss": 1.0, "lr": 0.005, "images_per_second": 40.0},
    {"step": 20, "val_mean_iou": 0.5},
    {"step": 24, "loss": 0.9, "lr": 0.001, "images_per_second": 40.0},
    {"step": 24, "val_mean_iou": 0.4},
]


def evaluation_of(matrix: ConfusionMatrix, classes: tuple[str, ...]) -> Evaluation:
    return Evaluation(
        classes=classes,
        confusion=matrix.counts,
        mean_iou=matrix.mean_iou,
        pixel_accuracy=matrix.pixel_accuracy,
        mean_accuracy=matrix.mean_accuracy,
        iou=tuple(matrix.iou.tolist()),
        accuracy=tuple(matrix.accuracy.tolist()),
        mean_boundary_iou=None,
        boundary_iou=None,
        images=8,
        seconds=1.0,
    )


def page_of(path: Path, classes: tuple[str, ...], size: tuple[int, int], used: int | None = None) -> str:
    """Write a report on random predictions and return its HTML. Only the first `used` classes occur."""
    rng = torch.Generator().manual_seed(0)
    count = len(classes)
    matrix, best_worst = ConfusionMatrix(count), BestWorstImages(count)
    for k in range(8):
        label, prediction = (torch.randint(0, used or count, size, generator=rng, dtype=torch.uint8) for _ in range(2))
        prediction = torch.where(torch.rand(size, generator=rng) < k / 10, label, prediction)
        image = torch.randint(0, 256, (3, *size), generator=rng, dtype=torch.uint8)
        matrix.update(prediction, label)
        best_worst.update(Batch(image[None], label[None], (f"<img {k}>&.jpg",)), prediction[None])
    palette: list[Color] = [(k % 256, 3 * k % 256, 7 * k % 256) for k in range(count)]
    write_run_page(
        path,
        recipe=small_recipe(),
        metrics=METRICS,
        evaluation=evaluation_of(matrix, classes),
        best_worst=best_worst,
        palette=palette,
        origin=ORIGIN,
    )
    return path.read_text(encoding="utf-8")


def test_a_report_has_all_sections_escapes_names_and_has_no_external_links(tmp_path: Path) -> None:
    page = page_of(tmp_path / "report.html", ("road", "<b>tree</b>", "sky & sea", "never"), (40, 60), used=3)
    for caption in ("training loss", "learning rate", "mean IoU on the validation split", "images per second"):
        assert caption in page
    assert page.count("<svg") == 4
    assert "a class that occurs in neither labels nor predictions has no IoU" in page
    assert "Without IoU: never." in page
    assert page.count('class="case"') == 6
    assert page.count("data:image/") == 24
    assert "validation after step 20" in page
    assert "head: caa" in page  # the recipe
    assert "torch 2.13.0." in page
    assert "(commit 0123456789ab with changes) on CPU, a &lt;fast&gt; one, 2 cores, 2 threads;" in page
    assert "cuda" not in page.partition("<footer")[2]

    assert "<b>tree" not in page
    assert "&lt;b&gt;tree&lt;/b&gt;" in page
    assert "<img 7" not in page
    assert "&lt;img 7&gt;&amp;.jpg" in page
    assert "a &lt;fast&gt; one" in page
    addresses = re.findall(r"""(?:src|href)="([^"]*)"|url\(([^)]*)\)""", page)
    assert all(one.startswith(("data:", "#")) for pair in addresses for one in pair if one)
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page


def test_pages_of_many_classes_and_large_images_stay_small(tmp_path: Path) -> None:
    classes = tuple(f"class {k}" for k in range(171))
    page = page_of(tmp_path / "report.html", classes, (500, 1000))
    assert 100_000 < len(page) < 3_000_000
    assert 'class="heat"' in page
    assert "Largest confusions" in page
    assert 'class="confusion"' not in page


def test_shares_are_normalized_per_row_and_the_largest_confusions_come_first() -> None:
    counts = np.array([[8, 2, 0], [5, 5, 0], [0, 0, 0]])
    shares = row_shares(counts)
    assert shares.tolist() == [[0.8, 0.2, 0], [0.5, 0.5, 0], [0, 0, 0]]
    assert largest_confusions(shares, ("a", "b", "c")) == [
        {"truth": "b", "prediction": "a", "share": 0.5},
        {"truth": "a", "prediction": "b", "share": 0.2},
    ]
    assert heat_map(shares).startswith("data:image/png;base64,")


def test_training_time_is_computed_from_the_speeds() -> None:
    assert training_seconds(METRICS, batch_size=4) == pytest.approx(10 * 4 / 20 + 10 * 4 / 40 + 4 * 4 / 40)
    assert training_seconds([], batch_size=4) == 0
