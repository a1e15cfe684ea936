"""Draw conflicts.png, gates.png and camvid_best_worst.png with the shipped model. Takes some minutes on two cores.

Usage: python docs/figures/camvid.py CAMVID [DIR], where CAMVID is the directory of the dataset.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from caaseg.analysis.conflicts import study_conflicts
from caaseg.data.datasets.camvid import CamVid
from caaseg.data.sample import IGNORE, Sample
from caaseg.drawing.overlays import class_legend, mark_pixels
from caaseg.drawing.panels import Row, draw_panels, label_panel
from caaseg.evaluation.best_worst import BestWorstImages, ScoredImage
from caaseg.evaluation.evaluate import evaluate
from caaseg.models import Segmenter, load_model
from caaseg.reports.conflicts import draw_conflicts, draw_gates
from caaseg.reports.evaluation import RED
from caaseg.reports.figures import save

CONFLICTS = Path(__file__).parents[2] / "benchmarks" / "results" / "conflicts_headline.json"
NUM_SHOWN = 4


class Selected:
    """Samples of CamVid's test split that are chosen by name."""

    def __init__(self, data: CamVid, names: list[str]) -> None:
        self.classes, self.palette = data.classes, data.palette
        self._samples = [sample for sample in (data[k] for k in range(len(data))) if sample.name in names]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


def most_lost() -> list[str]:
    """Return the first image of each quarter of the ranking by lost pixels that `caaseg conflicts` wrote."""
    images = json.loads(CONFLICTS.read_text())["images"]
    quarters = [images[k * len(images) // NUM_SHOWN : (k + 1) * len(images) // NUM_SHOWN] for k in range(NUM_SHOWN)]
    return [max(quarter, key=lambda image: image["lost_share"])["name"] for quarter in quarters]


def row(scored: ScoredImage, heading: str, data: CamVid) -> Row:
    """Return a row of panels: image, ground truth, prediction and errors."""
    image, wrong = scored.image, (scored.prediction != scored.label) & (scored.label != IGNORE)
    pixels = image.permute(1, 2, 0).numpy()
    panels = [
        pixels,
        label_panel(image, scored.label, data.palette),
        label_panel(image, scored.prediction, data.palette),
        mark_pixels(pixels, [(wrong.numpy(), RED)], scored.label.numpy()),
    ]
    return Row(f"{heading}: {scored.name}, mean IoU {100 * scored.mean_iou:.1f} %", panels)


def draw_views(data: CamVid, model: Segmenter, directory: Path) -> None:
    """Draw conflicts.png, with one image per sequence, and gates.png."""
    conflicts = study_conflicts(model, Selected(data, most_lost()), num_shown=NUM_SHOWN)
    wording = model.head.conflict_wording
    assert wording is not None
    shown = replace(conflicts, worst=conflicts.worst[::2])
    save(draw_conflicts(shown, wording, data.palette), directory / "conflicts.png")
    save(draw_gates(conflicts.worst), directory / "gates.png")


def draw_best_worst(data: CamVid, model: Segmenter, directory: Path) -> None:
    """Draw camvid_best_worst.png."""
    found = BestWorstImages(len(data.classes))
    evaluate(model, data, on_batch=found.update)
    rows = [row(scored, "best", data) for scored in found.best] + [row(scored, "worst", data) for scored in found.worst]
    labels = [labels for scored in (*found.best, *found.worst) for labels in (scored.label, scored.prediction)]
    legend = class_legend(labels, data.classes, data.palette)
    columns = ["image", "ground truth", "prediction", "errors"]
    figure = draw_panels(rows, columns, classes=legend, marks=[("wrong", RED)])
    save(figure, directory / "camvid_best_worst.png")


def draw(root: Path, directory: Path) -> None:
    """Draw all three figures."""
    data, model = CamVid(root, "test"), load_model("camvid")
    draw_views(data, model, directory)
    draw_best_worst(data, model, directory)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
