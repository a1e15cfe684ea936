"""The study of conflicting attentions: a page and figures in the paper's manner, the table by class, the numbers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text
from torch import Tensor

from caaseg.analysis.conflicts import Conflict, Conflicts, marks
from caaseg.data.sample import Color
from caaseg.drawing.panels import WIDTH, Row, draw_panels, labels_over, legend_of, placed
from caaseg.drawing.sheet import marked
from caaseg.models.heads.base import ConflictWording, Head
from caaseg.reports.figures import save
from caaseg.reports.page import data_address, picture, write_page

LOST: Color = (225, 45, 60)
WON: Color = (20, 120, 165)
OPEN: Color = (246, 205, 115)
CHANNELS = 32  # whose gates are drawn
LEAST = 0.001  # of a gate, which is from 0 to 1: what varies by less is drawn as level
RANKED = 20  # images in the page's list

PAGE, FIGURE, GATES = "conflicts.html", "conflicts.png", "gates.png"


def write_conflicts(
    folder: Path,
    conflicts: Conflicts,
    *,
    head: Head,
    title: str,
    on: str,
    palette: Sequence[Color],
    origin: dict[str, Any],
) -> list[Path]:
    """Write the page and its figures.

    Args:
        folder: for conflicts.html, conflicts.png and, of a CAA model, gates.png.
        conflicts: what was found.
        head: of the model.
        title: what was studied.
        on: the dataset and the split, in words.
        palette: colors of the classes.
        origin: hardware and versions, as `provenance` gives them.
    """
    wording = head.conflict_wording
    assert wording is not None
    figures = {FIGURE: draw_conflicts(conflicts, wording, palette)}
    if head.flattens_gates:
        figures[GATES] = draw_gates(conflicts.worst)
    for name, figure in figures.items():
        save(figure, folder / name)
    gates = data_address((folder / GATES).read_bytes(), "image/png") if GATES in figures else None
    write_page(
        folder / PAGE,
        "conflicts.html.j2",
        title=title,
        on=on,
        wording=wording,
        finding=sentences(conflicts, wording),
        numbers=conflicts_as_json(conflicts),
        palette=[tuple(color) for color in palette],
        marks=_legend_of_marks(wording),
        cases=[
            {
                "name": conflict.counts.name,
                "note": _note(conflict),
                "pictures": [
                    picture(pixels, caption)
                    for pixels, caption in zip(_panels(conflict, palette), _columns(conflicts), strict=True)
                ],
            }
            for conflict in conflicts.worst
        ],
        gates=gates,
        channels=CHANNELS,
        ranked=RANKED,
        origin=origin,
    )
    return [folder / PAGE, *(folder / name for name in figures)]


def sentences(conflicts: Conflicts, wording: ConflictWording) -> list[str]:
    """What the numbers say, whichever way they point."""
    counts = conflicts.counts
    labelled = int(counts.labelled.sum())
    lost, won = int(counts.lost.sum()) / labelled, int(counts.won.sum()) / labelled
    said = [f"{lost:.2%} of the labelled pixels are lost: {wording.lost}. {won:.2%} are won: {wording.won}."]
    whole = counts.views[-1].mean_iou
    best, score = max(
        ((name, matrix.mean_iou) for name, matrix in zip(conflicts.names, counts.views[:-1], strict=False)),
        key=lambda one: one[1],
    )
    gap = 100 * (whole - score)
    order = "as much as" if abs(gap) < 0.005 else f"{abs(gap):.2f} points {'more' if gap > 0 else 'less'} than"
    said.append(
        f"{conflicts.names[-1].capitalize()}, the model has {100 * whole:.2f} % mean IoU, {order} its "
        f"{'best ' if len(counts.views) > 2 else ''}other view ({best}, {100 * score:.2f} %)."
    )
    return said


def conflict_table(conflicts: Conflicts) -> Table:
    """A line a class, in % of its labelled pixels, and all of them below."""
    numbers = conflicts_as_json(conflicts)
    table = Table(title="right by each view, lost and won, in % of the labelled pixels", show_footer=True)
    table.add_column("class", footer="all")
    total = numbers["all"]
    for heading in conflicts.names:
        table.add_column(heading, footer=_percent(total["right"][heading]), justify="right")
    for heading in ("lost", "won"):
        table.add_column(heading, footer=_percent(total[heading]), justify="right")
    for one in numbers["classes"]:
        right = (one["right"][heading] for heading in conflicts.names)
        table.add_row(Text(one["name"]), *map(_percent, (*right, one["lost"], one["won"])))
    return table


def conflicts_as_json(conflicts: Conflicts) -> dict[str, Any]:
    """Plain values: numbers of pixels, and shares of the labelled ones; null where there are none."""
    counts = conflicts.counts
    labelled = counts.labelled.cpu()
    rows = {
        "lost": counts.lost.cpu(),
        "won": counts.won.cpu(),
        "disagree": counts.disagree.cpu(),
    }
    right = {name: m.counts.diagonal().cpu() for name, m in zip(conflicts.names, counts.views, strict=True)}
    every = int(labelled.sum())

    def shares(pick: Any, pixels: int) -> dict[str, Any]:
        return {
            "labelled": pixels,
            "share_of_labelled": pixels / every,
            "right": {name: _share(int(pick(of_one)), pixels) for name, of_one in right.items()},
            **{kind: _share(int(pick(of_one)), pixels) for kind, of_one in rows.items()},
            **{f"{kind}_pixels": int(pick(of_one)) for kind, of_one in rows.items()},
        }

    return {
        "views": [
            {
                "name": name,
                "mean_iou": matrix.mean_iou,
                "pixel_accuracy": matrix.pixel_accuracy,
                # Of the whole there is nothing to be lost or won.
                "lost_from": None if part is None else int(counts.lost_from[part].sum()) / every,
                "won_over": None if part is None else int(counts.won_over[part].sum()) / every,
            }
            for name, matrix, part in zip(
                conflicts.names, counts.views, [*range(len(conflicts.names) - 1), None], strict=True
            )
        ],
        "all": shares(lambda of_one: of_one.sum(), every),
        "classes": [
            {"name": name, **shares(lambda of_one, k=k: of_one[k], int(labelled[k]))}
            for k, name in enumerate(conflicts.classes)
        ],
        "images": [
            {
                **one._asdict(),
                "lost_share": one.lost_share,
                "won_share": one.won / one.labelled,
                "disagree_share": one.disagree / one.labelled,
            }
            for one in conflicts.images
        ],
    }


def draw_conflicts(conflicts: Conflicts, wording: ConflictWording, palette: Sequence[Color]) -> Figure:
    """The worst images: image, truth, each view, and where something was lost or won."""
    rows = [
        Row(f"{conflict.counts.name}: {_note(conflict)}", _panels(conflict, palette)) for conflict in conflicts.worst
    ]
    seen = [labels for conflict in conflicts.worst for labels in (conflict.label, *conflict.views)]
    classes = legend_of(seen, conflicts.classes, palette)
    return draw_panels(rows, _columns(conflicts), classes=classes, marks=_legend_of_marks(wording))


def draw_gates(worst: Sequence[Conflict]) -> Figure:
    """Each image with its column gate at its right, row by row, and its row gate below, column by column.

    What is drawn is what a level gate lacks: a gate less its mean over the positions, of the channels in which that
    varies most.
    """
    shown = [(conflict, conflict.gates) for conflict in worst if conflict.gates is not None]
    drawn = [(_varying(gates.column), _varying(gates.row)) for _, gates in shown]
    limits = [max(LEAST, *(float(np.abs(gates[axis]).max()) for gates in drawn)) for axis in (0, 1)]
    cell, side, gap = WIDTH / 2, 1.2, 0.1  # inches: half of the figure an image, its gates, and between them
    width = cell - side - 4 * gap
    heights = [width * conflict.label.shape[0] / conflict.label.shape[1] for conflict, _ in shown]
    rows = [max(heights[k : k + 2]) + side + 0.75 for k in range(0, len(shown), 2)]
    figure = Figure(figsize=(WIDTH, sum(rows) + 0.6))
    for number, ((conflict, _), (column, row), height) in enumerate(zip(shown, drawn, heights, strict=True)):
        left, top = number % 2 * cell + 2 * gap, sum(rows[: number // 2]) + 0.3
        image = placed(figure, left, top, width, height)
        image.imshow(conflict.image.permute(1, 2, 0).numpy(), aspect="auto")
        image.set_title(conflict.counts.name, fontsize=11, loc="left", pad=4)
        beside = placed(figure, left + width + gap, top, side, height)
        beside.set_title("column gate", fontsize=11, pad=4)
        below = placed(figure, left, top + height + gap, width, side)
        below.set_xlabel("row gate", fontsize=11)
        below.set_ylabel("channels", fontsize=10)
        beside.set_xlabel("channels", fontsize=10)
        bars = _heat(beside, column, limits[0]), _heat(below, row.T, limits[1])
        for panel in (image, beside, below):
            panel.set(xticks=[], yticks=[])
    for number, (bar, name) in enumerate(zip(bars, ("column gate", "row gate"), strict=True)):
        place = placed(figure, number * cell + 5 * gap, sum(rows), cell - 10 * gap, 0.15)
        ticks = (-limits[number], 0, limits[number])
        figure.colorbar(bar, cax=place, orientation="horizontal", ticks=ticks, format="%.2g")
        place.set_xlabel(f"{name}, less its mean over positions", fontsize=11)
    return figure


def _heat(panel: Axes, values: NDArray[np.float32], limit: float) -> AxesImage:
    return panel.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")


def _varying(gate: Tensor) -> NDArray[np.float32]:
    """(L, C) -> (L, CHANNELS), the channels that vary most over positions, first, less their means."""
    apart = gate - gate.mean(0)
    order = apart.square().sum(0).argsort(descending=True, stable=True)[:CHANNELS]
    chosen: NDArray[np.float32] = apart[:, order].numpy()
    return chosen


def _panels(conflict: Conflict, palette: Sequence[Color]) -> list[NDArray[np.uint8]]:
    image = conflict.image.permute(1, 2, 0).numpy()
    lost, won, disagree = (pixels.numpy() for pixels in marks(conflict.views, conflict.label))
    return [
        image,
        *(labels_over(conflict.image, labels, palette) for labels in (conflict.label, *conflict.views)),
        marked(image, [(disagree, OPEN), (lost, LOST), (won, WON)], conflict.label.numpy()),
    ]


def _columns(conflicts: Conflicts) -> list[str]:
    return ["image", "truth", *conflicts.names, "lost and won"]


def _legend_of_marks(wording: ConflictWording) -> list[tuple[str, Color]]:
    kinds = ((wording.lost, LOST), (wording.won, WON), (wording.disagree, OPEN))
    return [(name, color) for name, color in kinds if name is not None]


def _note(conflict: Conflict) -> str:
    counts = conflict.counts
    return f"{counts.lost_share:.1%} of the labelled pixels lost, {counts.won / counts.labelled:.1%} won"


def _share(pixels: int, of: int) -> float | None:
    return pixels / of if of else None


def _percent(share: float | None) -> str:
    return "" if share is None or math.isnan(share) else f"{100 * share:.2f}"
