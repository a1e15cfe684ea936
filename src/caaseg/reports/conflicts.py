"""Results of the conflict study: HTML page, figures, table per class, sentences and JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text
from torch import Tensor

from caaseg.analysis.conflicts import ConflictImage, Conflicts, mark_conflicts
from caaseg.data.sample import Color
from caaseg.drawing.overlays import background_class, class_legend, mark_pixels
from caaseg.drawing.panels import WIDTH, Row, axes_at, draw_panels, label_panel
from caaseg.models.heads.base import ConflictWording, Head
from caaseg.reports.figures import save
from caaseg.reports.page import data_url, percent, picture, write_page

LOST: Color = (225, 45, 60)
WON: Color = (20, 120, 165)
DISAGREE: Color = (246, 205, 115)
CHANNELS = 32  # channels drawn per gate
MIN_RANGE = 0.001  # smallest range of the gate color scale, so that tiny variations have almost no color
MAX_RANKED = 20  # images in the ranking of the page

PAGE, FIGURE, GATES = "conflicts.html", "conflicts.png", "gates.png"


def write_conflicts(
    directory: Path,
    conflicts: Conflicts,
    *,
    head: Head,
    title: str,
    data: str,
    palette: Sequence[Color],
    origin: dict[str, Any],
) -> list[Path]:
    """Write conflicts.html, conflicts.png and, for a CAA model, gates.png.

    Args:
        directory: output directory.
        conflicts: result of `study_conflicts`.
        head: head of the model.
        title: title of the page.
        data: dataset and split, as text.
        palette: colors of the classes.
        origin: hardware and versions, from `provenance`.

    Returns:
        The paths of the files.
    """
    wording, columns = head.conflict_wording, _columns(conflicts)
    assert wording is not None
    background = background_class(conflicts.classes)
    figures = {FIGURE: draw_conflicts(conflicts, wording, palette)}
    if head.averages_gates:
        figures[GATES] = draw_gates(conflicts.worst)
    for name, figure in figures.items():
        save(figure, directory / name)
    write_page(
        directory / PAGE,
        "conflicts.html.j2",
        title=title,
        data=data,
        wording=wording,
        finding=conflict_lines(conflicts, wording),
        numbers=conflicts_as_json(conflicts),
        palette=[tuple(color) for color in palette],
        marks=_mark_legend(wording),
        cases=[
            {
                "name": shown.counts.name,
                "note": _note(shown),
                "pictures": [
                    picture(*panel) for panel in zip(_panels(shown, palette, background), columns, strict=True)
                ],
            }
            for shown in conflicts.worst
        ],
        gates=data_url(directory / GATES) if GATES in figures else None,
        channels=CHANNELS,
        max_ranked=MAX_RANKED,
        origin=origin,
    )
    return [directory / PAGE, *(directory / name for name in figures)]


def conflict_lines(conflicts: Conflicts, wording: ConflictWording) -> list[str]:
    """Return the result on the whole split as sentences."""
    counts, names = conflicts.counts, conflicts.names
    labeled = int(counts.labeled.sum())
    lost, won = int(counts.lost.sum()) / labeled, int(counts.won.sum()) / labeled
    *parts, whole = (matrix.mean_iou for matrix in counts.views)
    score, name = max(zip(parts, names, strict=False), key=lambda pair: pair[0])
    gap = 100 * (whole - score)
    order = "the same as" if abs(gap) < 0.005 else f"{abs(gap):.2f} points {'more' if gap > 0 else 'less'} than"
    return [
        f"{lost:.2%} of the labeled pixels are lost: {wording.lost}. {won:.2%} are won: {wording.won}.",
        f"The model's prediction ({names[-1]}) has {100 * whole:.2f} % mean IoU, {order} its "
        f"{'best ' if len(parts) > 1 else ''}other view ({name}, {100 * score:.2f} %).",
    ]


def conflict_table(conflicts: Conflicts) -> Table:
    """Return a table with one row per class, in percent of its labeled pixels, and the total below."""
    numbers = conflicts_as_json(conflicts)

    def cells(record: dict[str, Any]) -> list[str]:
        right = (record["right"][name] for name in conflicts.names)
        return [percent(share, 2, "") for share in (*right, record["lost"], record["won"])]

    table = Table(title="correct per view, lost and won, in % of the labeled pixels", show_footer=True)
    table.add_column("class", footer="all")
    for heading, total in zip((*conflicts.names, "lost", "won"), cells(numbers["all"]), strict=True):
        table.add_column(heading, footer=total, justify="right")
    for record in numbers["classes"]:
        table.add_row(Text(record["name"]), *cells(record))
    return table


def conflicts_as_json(conflicts: Conflicts) -> dict[str, Any]:
    """Return pixel counts and shares of the labeled pixels as plain values; undefined shares are None."""
    counts = conflicts.counts
    labeled = counts.labeled.cpu()
    total = int(labeled.sum())
    kinds = {"lost": counts.lost.cpu(), "won": counts.won.cpu(), "disagree": counts.disagree.cpu()}
    right = {name: m.counts.diagonal().cpu() for name, m in zip(conflicts.names, counts.views, strict=True)}

    def record(classes: slice) -> dict[str, Any]:
        pixels = int(labeled[classes].sum())

        def share(of_class: Tensor) -> float | None:
            return int(of_class[classes].sum()) / pixels if pixels else None

        return {
            "labeled": pixels,
            "share_of_labeled": pixels / total,
            "right": {name: share(of_class) for name, of_class in right.items()},
            **{kind: share(of_class) for kind, of_class in kinds.items()},
            **{f"{kind}_pixels": int(of_class[classes].sum()) for kind, of_class in kinds.items()},
        }

    # The last view is the whole model, which has no pixels lost from it or won over it.
    lost_from, won_over = (
        [*(each.sum(1).double() / total).tolist(), None] for each in (counts.lost_from, counts.won_over)
    )
    return {
        "views": [
            {
                "name": name,
                "mean_iou": matrix.mean_iou,
                "pixel_accuracy": matrix.pixel_accuracy,
                "lost_from": lost_from[index],
                "won_over": won_over[index],
            }
            for index, (name, matrix) in enumerate(zip(conflicts.names, counts.views, strict=True))
        ],
        "all": record(slice(None)),
        "classes": [{"name": name, **record(slice(k, k + 1))} for k, name in enumerate(conflicts.classes)],
        "images": [
            {
                **image._asdict(),
                "lost_share": image.lost_share,
                "won_share": image.won / image.labeled,
                "disagree_share": image.disagree / image.labeled,
            }
            for image in conflicts.images
        ],
    }


def draw_conflicts(conflicts: Conflicts, wording: ConflictWording, palette: Sequence[Color]) -> Figure:
    """Draw the worst images: image, ground truth, each view, and lost and won pixels."""
    background = background_class(conflicts.classes)
    rows = [
        Row(f"{shown.counts.name}: {_note(shown)}", _panels(shown, palette, background)) for shown in conflicts.worst
    ]
    labels = [labels for shown in conflicts.worst for labels in (shown.label, *shown.views)]
    legend = class_legend(labels, conflicts.classes, palette)
    return draw_panels(rows, _columns(conflicts), classes=legend, marks=_mark_legend(wording))


def draw_gates(worst: Sequence[ConflictImage]) -> Figure:
    """Draw each image with its column gate at the right, row by row, and its row gate below, column by column.

    The values are gates minus their mean over positions, for the channels that vary most: the part that an averaged
    gate lacks.
    """
    shown = [(image, image.gates) for image in worst if image.gates is not None]
    drawn = [(_most_varying(gates.column), _most_varying(gates.row)) for _, gates in shown]
    limits = [max(MIN_RANGE, *(float(np.abs(gates[axis]).max()) for gates in drawn)) for axis in (0, 1)]
    cell, side, gap = WIDTH / 2, 1.2, 0.1  # inches: width per image, width of a gate, gap between panels
    width = cell - side - 4 * gap
    heights = [width * image.label.shape[0] / image.label.shape[1] for image, _ in shown]
    rows = [max(heights[k : k + 2]) + side + 0.75 for k in range(0, len(shown), 2)]
    figure = Figure(figsize=(WIDTH, sum(rows) + 0.6))
    heat = {"aspect": "auto", "cmap": "RdBu_r", "interpolation": "nearest"}
    for index, ((image, _), (column, row), height) in enumerate(zip(shown, drawn, heights, strict=True)):
        left, top = index % 2 * cell + 2 * gap, sum(rows[: index // 2]) + 0.3
        panel = axes_at(figure, left, top, width, height)
        panel.imshow(image.image.permute(1, 2, 0).numpy(), aspect="auto")
        panel.set_title(image.counts.name, fontsize=11, loc="left", pad=4)
        right_axes = axes_at(figure, left + width + gap, top, side, height)
        right_axes.set_title("column gate", fontsize=11, pad=4)
        right_axes.set_xlabel("channels", fontsize=10)
        below = axes_at(figure, left, top + height + gap, width, side)
        below.set_xlabel("row gate", fontsize=11)
        below.set_ylabel("channels", fontsize=10)
        maps = [
            axes.imshow(values, vmin=-limit, vmax=limit, **heat)  # type: ignore[arg-type]
            for axes, values, limit in zip((right_axes, below), (column, row.T), limits, strict=True)
        ]
        for axes in (panel, right_axes, below):
            axes.set(xticks=[], yticks=[])
    for index, (heat_map, name, limit) in enumerate(zip(maps, ("column gate", "row gate"), limits, strict=True)):
        bar = axes_at(figure, index * cell + 5 * gap, sum(rows), cell - 10 * gap, 0.15)
        figure.colorbar(heat_map, cax=bar, orientation="horizontal", ticks=(-limit, 0, limit), format="%.2g")
        bar.set_xlabel(f"{name} minus its mean over positions", fontsize=11)
    return figure


def _most_varying(gate: Tensor) -> NDArray[np.float32]:
    """(L, C) -> (L, CHANNELS): the channels with the largest variance over positions, largest first, centered."""
    centered = gate - gate.mean(0)
    order = centered.square().sum(0).argsort(descending=True, stable=True)[:CHANNELS]
    chosen: NDArray[np.float32] = centered[:, order].numpy()
    return chosen


def _panels(shown: ConflictImage, palette: Sequence[Color], background: int | None) -> list[NDArray[np.uint8]]:
    image = shown.image.permute(1, 2, 0).numpy()
    lost, won, disagree = (mask.numpy() for mask in mark_conflicts(shown.views, shown.label))
    return [
        image,
        *(label_panel(shown.image, labels, palette, background) for labels in (shown.label, *shown.views)),
        mark_pixels(image, [(disagree, DISAGREE), (lost, LOST), (won, WON)], shown.label.numpy()),
    ]


def _columns(conflicts: Conflicts) -> list[str]:
    return ["image", "ground truth", *conflicts.names, "lost and won"]


def _mark_legend(wording: ConflictWording) -> list[tuple[str, Color]]:
    marks = ((wording.lost, LOST), (wording.won, WON), (wording.disagree, DISAGREE))
    return [(name, color) for name, color in marks if name is not None]


def _note(shown: ConflictImage) -> str:
    counts = shown.counts
    return f"{counts.lost_share:.1%} of the labeled pixels lost, {counts.won / counts.labeled:.1%} won"
