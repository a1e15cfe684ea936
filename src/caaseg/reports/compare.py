"""Models side by side: image, truth and what each says, the places where they differ most in boxes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from caaseg.analysis.compare import Compared, Differences
from caaseg.config import ModelConfig
from caaseg.data.sample import Color
from caaseg.drawing.panels import Row, draw_panels, labels_over, legend_of


def names_of(sources: Sequence[str], configs: Sequence[ModelConfig]) -> list[str]:
    """What to call models: by head and backbone where that tells them apart, by folder, or else as they were given."""
    heads, backbones = {config.head for config in configs}, {config.backbone for config in configs}
    by_parts = [f"{config.head}, {config.backbone}" for config in configs]
    if len(backbones) == 1 and len(heads) == len(configs):
        by_parts = [config.head for config in configs]
    by_folder = [Path(source).name for source in sources]
    for names in (by_parts, by_folder, list(sources)):
        if len(set(names)) == len(names):
            return names
    return [f"{source} ({number})" for number, source in enumerate(sources, start=1)]


def draw_comparison(
    differences: Differences, names: Sequence[str], classes: Sequence[str], palette: Sequence[Color]
) -> Figure:
    """The images that models differ most on, in the manner of the paper's result figures."""
    rows = [
        Row(
            _note(compared, names),
            [
                compared.image.permute(1, 2, 0).numpy(),
                labels_over(compared.image, compared.label, palette),
                *(labels_over(compared.image, prediction, palette) for prediction in compared.predictions),
            ],
            compared.boxes,
        )
        for compared in differences.shown
    ]
    seen = [labels for compared in differences.shown for labels in (compared.label, *compared.predictions)]
    return draw_panels(rows, ["image", "truth", *names], classes=legend_of(seen, classes, palette))


def lines(differences: Differences, names: Sequence[str]) -> list[str]:
    """What the split says as a whole."""
    differing = sum(one.differing for one in differences.images)
    share = differing / sum(one.labelled for one in differences.images)
    right = [sum(one.right[k] for one in differences.images) / max(1, differing) for k in range(len(names))]
    scores = ", ".join(
        f"{name} {100 * matrix.mean_iou:.2f}" for name, matrix in zip(names, differences.matrices, strict=True)
    )
    return [
        f"mean IoU, whole images at scale 1: {scores}",
        f"The models differ on {share:.2%} of the labelled pixels; of these "
        + ", ".join(f"{name} has {one:.1%} right" for name, one in zip(names, right, strict=True))
        + ".",
    ]


def comparison_as_json(differences: Differences, names: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    """The same as plain values, with every image's numbers."""
    boxes = {compared.counts.name: [box._asdict() for box in compared.boxes] for compared in differences.shown}
    return {
        "models": [
            {
                "name": name,
                "model": source,
                "mean_iou": None if matrix.counts.sum() == 0 else matrix.mean_iou,
                "right_of_differing": sum(one.right[k] for one in differences.images),
            }
            for k, (name, source, matrix) in enumerate(zip(names, sources, differences.matrices, strict=True))
        ],
        "labelled": sum(one.labelled for one in differences.images),
        "differing": sum(one.differing for one in differences.images),
        "images": [
            {
                "name": one.name,
                "share": one.share,
                "labelled": one.labelled,
                "differing": one.differing,
                "right_of_differing": list(one.right),
                "boxes": boxes.get(one.name),
            }
            for one in differences.images
        ],
    }


def _note(compared: Compared, names: Sequence[str]) -> str:
    counts = compared.counts
    if counts.differing == 0:
        return f"{counts.name}: no labelled pixel on which they differ"
    right = ", ".join(f"{name} {k / counts.differing:.0%}" for name, k in zip(names, counts.right, strict=True))
    return f"{counts.name}: they differ on {counts.share:.1%} of the labelled pixels, and of these have right: {right}"
