"""What a table of the paper asks to be run: a grid of cells, every row with every seed. Nothing is run here.

The grid's folder holds cells/ROW-seedK.json, all that is known of a finished cell, and runs/ROW-seedK/, its run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from caaseg.config import Recipe
from caaseg.data.catalogue import find
from caaseg.recipes import load_recipe
from caaseg.reproduce.tables import SCALES, TABLES, Row

BASES = {
    "pascal_context": "pascal_context/caa_resnet101_s16",
    "coco_stuff_10k": "coco_stuff_10k/caa_aux_resnet101_s8",
    "coco_stuff_164k": "coco_stuff_164k/caa_efficientnet_b5_s8",
    "cityscapes": "cityscapes/caa_aux_resnet101_s8",
    "camvid": "camvid/caa_resnet50",
    "folder": "folder/caa_resnet18",
    "scenes": "scenes/caa_resnet18",
}
"""The recipe of a grid on a dataset, where none is given."""


class Manner(NamedTuple):
    """How a model is scored."""

    split: str
    scales: tuple[float, ...]
    flip: bool

    @property
    def label(self) -> str:
        return "several scales, mirrored" if self.flip else "single scale"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row trained with a seed."""

    row: str
    seed: int
    recipe: Recipe
    manners: tuple[Manner, ...]
    """How it is scored: the final model, after the last step."""

    @property
    def name(self) -> str:
        return f"{self.row}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is to be run and shown."""

    name: str
    folder: Path
    rows: tuple[Row, ...]
    seeds: int
    cells: tuple[Cell, ...]
    """All rows of the first seed, then those of the next: what is stopped early leaves whole comparisons."""
    by_row: Mapping[tuple[str, int], Cell]
    """Of a row and a seed. Rows that the recipe makes the same network share cells."""
    recipe: str | None
    """What all rows are trained by; None where each is by its own."""
    words: tuple[str, ...]
    """What was overridden in it."""

    def file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"

    def run(self, cell: Cell) -> Path:
        return self.folder / "runs" / cell.name


def plan_grid(
    name: str,
    folder: Path,
    *,
    dataset: str | None = None,
    recipe: str | None = None,
    root: Path | None = None,
    rows: Sequence[str] | None = None,
    seeds: int = 1,
    split: str | None = None,
    multi_scale: bool = False,
    scales: tuple[float, ...] = SCALES,
    overrides: Sequence[str] = (),
) -> Grid:
    """What a table asks for, checked; nothing is run yet.

    Args:
        name: a table that is trained for.
        folder: of the grid.
        dataset: train on it instead of the paper's, by one recipe for all rows.
        recipe: that recipe; the one of BASES unless given.
        root: folder of the dataset.
        rows: names of the rows to run; all unless given.
        seeds: seeds 0 to seeds - 1.
        split: what final models are scored on; the recipe's val_split unless given.
        multi_scale: score at several scales and mirrored too, where the paper's table does not.
        scales: these.
        overrides: values of the recipe as words of a command line; they beat what the rows say.
    """
    table = TABLES[name]
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; expected 1 or more")
    for word in overrides:
        for option, instead in (("--seed", "--seeds N, which runs seeds 0 to N - 1"), ("--data.dataset", "--dataset")):
            if word.partition("=")[0] == option:
                raise ValueError(f"{option} is what the grid itself decides; expected {instead}")
    words = (*overrides, *(() if root is None else ("--data.root", str(root))))
    known = [row for row in table.rows if recipe is None and row.dataset == dataset and dataset is not None]
    own = recipe is None and (dataset is None or bool(known))
    base = None if own else recipe or _base(name, dataset)
    if own and any(row.recipe is None for row in table.rows):
        raise ValueError(f"{name} is no table of the paper and has no data of its own; give --dataset or --recipe")
    recipes = {row.name: _recipe(row, base, words) for row in known or table.rows}
    if base is not None and dataset is not None:
        found = next(iter(recipes.values())).data.dataset
        if found != dataset:
            raise ValueError(f"--dataset is {dataset}, but recipe {base} is for {found}; leave out one of them")
    several = multi_scale or any("multi" in row.paper for row in table.rows)
    chosen = _chosen(rows, known or table.rows)
    # Of rows that the recipe makes the same network the first gives its name, whichever of them are run.
    names = {row: next(other for other in recipes if recipes[other] == recipes[row]) for row in recipes}

    def cell(row: Row, seed: int) -> Cell:
        seeded = recipes[row.name].replace(seed=seed)
        where = split or seeded.data.val_split
        manners = (Manner(where, (1.0,), False), *([Manner(where, scales, True)] if several else []))
        return Cell(row=names[row.name], seed=seed, recipe=seeded, manners=manners)

    by_row = {(row.name, seed): cell(row, seed) for seed in range(seeds) for row in chosen}
    return Grid(
        name=name,
        folder=folder,
        rows=tuple(chosen),
        seeds=seeds,
        cells=tuple({cell.name: cell for cell in by_row.values()}.values()),
        by_row=by_row,
        recipe=base,
        words=tuple(overrides),
    )


def _base(name: str, dataset: str | None) -> str:
    assert dataset is not None
    find(dataset)
    if dataset not in BASES:
        raise ValueError(f"no recipe is shipped for {dataset}; give one by --recipe, a name or a YAML file")
    return BASES[dataset]


def _recipe(row: Row, base: str | None, words: Sequence[str]) -> Recipe:
    if base is None:
        assert row.recipe is not None
        return load_recipe(row.recipe, words)
    changed = [f"--model.{key}={json.dumps(value) if value is None else value}" for key, value in row.model.items()]
    return load_recipe(base, [*changed, *words])


def _chosen(names: Sequence[str] | None, rows: Sequence[Row]) -> list[Row]:
    if names is None:
        return list(rows)
    for name in names:
        if name not in {row.name for row in rows}:
            raise ValueError(f"--rows has {name!r}; expected any of {', '.join(row.name for row in rows)}")
    return [row for row in rows if row.name in names]
