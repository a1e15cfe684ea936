"""Contact sheet of a dataset: each image next to its label overlay, with a legend."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from caaseg.data.sample import Color, Sample
from caaseg.drawing.overlays import background_class, class_legend, overlay
from caaseg.drawing.panels import legend_patches

WIDTH = 12.0  # inches
PAIRS_PER_ROW = 2
LEGEND_COLUMNS = 6


def draw_sheet(samples: Sequence[Sample], classes: Sequence[str], palette: Sequence[Color], title: str) -> Figure:
    """Draw pairs of image and label overlay, two pairs per row.

    Ignored pixels are black, and a background class is transparent.
    """
    legend = class_legend([sample.label for sample in samples], classes, palette)
    background = background_class(classes)
    rows = -(-len(samples) // PAIRS_PER_ROW)
    max_aspect = max(sample.label.shape[0] / sample.label.shape[1] for sample in samples)
    row_height = WIDTH / (2 * PAIRS_PER_ROW) * max_aspect + 0.1
    legend_height = 0.3 + 0.22 * -(-len(legend) // LEGEND_COLUMNS)
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.04, hspace=0.01, wspace=0.01)
    figure = Figure(figsize=(WIDTH, 0.4 + rows * row_height + legend_height), layout=layout)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    axes = figure.subplots(rows, 2 * PAIRS_PER_ROW, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    for (left, right), sample in zip(axes.reshape(-1, 2), samples, strict=False):
        image = sample.image.permute(1, 2, 0).numpy()
        left.imshow(image, interpolation="antialiased")
        left.set_title(sample.name, fontsize=8, loc="left", pad=3)
        right.imshow(overlay(image, sample.label.numpy(), palette, background=background), interpolation="antialiased")
    handles = legend_patches(legend)
    figure.legend(handles=handles, loc="outside lower left", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9)
    return figure
