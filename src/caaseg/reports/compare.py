"""Results of a comparison of models: figure, sentences and JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from caaseg.analysis.compare import ComparedImage, Comparison
from caaseg.config import ModelConfig
from caaseg.data.sample import Color
from caaseg.drawing.overlays import background_class, class_legend
from caaseg.drawing.panels import Row, draw_panels, label_panel


def model_names(sources: Sequence[str], configs: Sequence[ModelConfig]) -> list[str]:
    """Return distinct names: the head, the head and backbone, the directory name or the path, as short as possible."""
    heads, backbones = {config.head for config in configs}, {config.backbone for config in configs}
    by_config = [f"{config.head}, {config.backbone}" for config in configs]
    if len(backbones) == 1 and len(heads) == len(configs):
        by_config = [config.head for config in configs]
    for names in (by_config, [Path(source).name for source in sources], list(sources)):
        if len(set(names)) == len(names):
            return names
    return [f"{source} ({number})" for number, source in enumerate(sources, start=1)]


def draw_comparison(
    comparison: Comparison, names: Sequence[str], classes: Sequence[str], palette: Sequence[Color]
) -> Figure:
    """Draw image, ground truth and the prediction of each model, with boxes where the predictions differ most."""
    background = background_class(classes)
    rows = [
        Row(
            _caption(shown, names),
            [
                shown.image.permute(1, 2, 0).numpy(),
                *(
                    label_panel(shown.image, labels, palette, background)
                    for labels in (shown.label, *shown.predictions)
                ),
            ],
            shown.boxes,
        )
        for shown in comparison.shown
    ]
    labels = [labels for shown in comparison.shown for labels in (shown.label, *shown.predictions)]
    columns = ["image", "ground truth", *names]
    return draw_panels(rows, columns, classes=class_legend(labels, classes, palette))


def comparison_lines(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return the result on the whole split as sentences."""
    numbers = comparison_as_json(comparison, names, names)
    scores = ", ".join(
        f"{name} {100 * matrix.mean_iou:.2f}" for name, matrix in zip(names, comparison.matrices, strict=True)
    )
    right = ", ".join(
        f"{model['name']} is right on {model['right_of_differing'] / max(1, numbers['differing']):.1%}"
        for model in numbers["models"]
    )
    return [
        f"mean IoU, whole images at scale 1: {scores}",
        f"The models differ on {numbers['differing'] / numbers['labeled']:.2%} of the labeled pixels; "
        f"of these pixels, {right}.",
    ]


def comparison_as_json(comparison: Comparison, names: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    """Return scores and pixel counts of all models and images as plain values."""
    boxes = {shown.counts.name: [box._asdict() for box in shown.boxes] for shown in comparison.shown}
    return {
        "models": [
            {
                "name": name,
                "model": source,
                "mean_iou": None if matrix.counts.sum() == 0 else matrix.mean_iou,
                "right_of_differing": sum(image.right[k] for image in comparison.images),
            }
            for k, (name, source, matrix) in enumerate(zip(names, sources, comparison.matrices, strict=True))
        ],
        "labeled": sum(image.labeled for image in comparison.images),
        "differing": sum(image.differing for image in comparison.images),
        "images": [
            {
                "name": image.name,
                "share": image.share,
                "labeled": image.labeled,
                "differing": image.differing,
                "right_of_differing": list(image.right),
                "boxes": boxes.get(image.name),
            }
            for image in comparison.images
        ],
    }


def _caption(shown: ComparedImage, names: Sequence[str]) -> str:
    counts = shown.counts
    if counts.differing == 0:
        return f"{counts.name}: the predictions are equal on all labeled pixels"
    right = ", ".join(f"{name} {k / counts.differing:.0%}" for name, k in zip(names, counts.right, strict=True))
    return f"{counts.name}: predictions differ on {counts.share:.1%} of the labeled pixels; right on these: {right}"
