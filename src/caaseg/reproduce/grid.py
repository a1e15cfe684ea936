"""The grid of runs for a table of the paper: every row with every seed. Nothing is run here.

The grid's directory holds cells/ROW-seedK.json, the results of a finished cell, and runs/ROW-seedK/, its run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from caaseg.config import Recipe
from caaseg.data.catalogue import find
from caaseg.errors import CaasegError
from caaseg.models.heads import HEADS, resolve_head
from caaseg.recipes import load_recipe
from caaseg.reproduce.tables import BASES, OWN_HEAD, SCALES, TABLES, Row, options_of


class EvaluationProtocol(NamedTuple):
    """Evaluation protocol: split, scales and flipping."""

    split: str
    scales: tuple[float, ...]
    flip: bool

    @property
    def label(self) -> str:
        return "several scales, flipped" if self.flip else "single scale"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of the grid: a row with a seed."""

    row: str
    seed: int
    recipe: Recipe
    protocols: tuple[EvaluationProtocol, ...]
    """How the final model is evaluated."""

    @property
    def name(self) -> str:
        return f"{self.row}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a table."""

    name: str
    directory: Path
    rows: tuple[Row, ...]
    seeds: int
    cells: tuple[Cell, ...]
    """All rows of the first seed, then all rows of the next seed, so that an interrupted grid has comparable rows."""
    by_row: Mapping[tuple[str, int], Cell]
    """The cell of a row and a seed. Rows with the same recipe share cells."""
    recipe: str | None
    """The recipe of all rows; None if each row has its own recipe."""
    overrides: tuple[str, ...]
    """Command-line options that override values of the recipe."""

    def seeds_of(self, row: Row) -> list[int]:
        """Return the seeds of a row in ascending order; rows may have different numbers of seeds."""
        return sorted(seed for name, seed in self.by_row if name == row.name)

    def file(self, cell: Cell) -> Path:
        """Return the path of the results of a cell."""
        return self.directory / "cells" / f"{cell.name}.json"

    def run(self, cell: Cell) -> Path:
        """Return the run directory of a cell."""
        return self.directory / "runs" / cell.name


def plan_grid(
    name: str,
    directory: Path,
    *,
    dataset: str | None = None,
    recipe: str | None = None,
    root: Path | None = None,
    rows: Sequence[str] | None = None,
    seeds: int | None = None,
    split: str | None = None,
    multi_scale: bool = False,
    scales: tuple[float, ...] = SCALES,
    overrides: Sequence[str] = (),
) -> Grid:
    """Return the runs of a table, validated. Nothing is run.

    Args:
        name: table name.
        directory: directory of the grid.
        dataset: train all rows on this dataset with one recipe, instead of on the paper's dataset.
        recipe: recipe of all rows; by default the base recipe of the dataset.
        root: directory of the dataset.
        rows: names of the rows to run; by default all. For the table of heads, file.py:Class is the row of a head of
            your own, named after its class.
        seeds: number of seeds, numbered from 0; by default that of the table with the rows' own
            recipes (5 for the paper's), and 1 with another recipe.
        split: split to evaluate on; by default the recipe's val_split.
        multi_scale: also evaluate at several scales with flips, even if the paper's table does not.
        scales: scales of that evaluation.
        overrides: command-line options that change the recipe; they take precedence over the row's values.
    """
    table = TABLES[name]
    recipe = recipe or table.recipe
    if seeds is not None and seeds < 1:
        raise CaasegError(f"--seeds is {seeds}; expected 1 or more")
    for override in overrides:
        for option, instead in (("--seed", "--seeds N, which runs seeds 0 to N - 1"), ("--data.dataset", "--dataset")):
            if override.partition("=")[0] == option:
                raise CaasegError(f"{option} is set by the grid; expected {instead}")
    options = (*overrides, *(() if root is None else (f"--data.root={root}",)))
    own_heads = _own_heads(rows or ()) if name == "heads" else {}
    table_rows = (*table.rows, *own_heads.values())
    known = [row for row in table_rows if recipe is None and row.dataset == dataset and dataset is not None]
    uses_own_recipes = recipe is None and (dataset is None or bool(known))
    seeds = seeds or (table.seeds if uses_own_recipes else 1)
    base = None if uses_own_recipes else recipe or _base(dataset)
    if uses_own_recipes and any(row.dataset is None for row in table_rows):
        raise CaasegError(f"{name} is not a table of the paper and has no dataset; give --dataset or --recipe")
    recipes = {row.name: _recipe(name, row, base, options) for row in known or table_rows}
    if base is not None and dataset is not None:
        found = next(iter(recipes.values())).data.dataset
        if found != dataset:
            raise CaasegError(f"--dataset is {dataset}, but recipe {base} is for {found}; leave out one of them")
    several = multi_scale or any("multi" in row.paper for row in table.rows)
    wanted = None if rows is None else [own_heads[row].name if row in own_heads else row for row in rows]
    chosen = _chosen(wanted, known or table_rows)
    # Rows with the same recipe share the name of the first of these rows, even if that row is not run.
    names = {row: next(other for other in recipes if recipes[other] == recipes[row]) for row in recipes}

    def cell(row: Row, seed: int) -> Cell:
        seeded = recipes[row.name].replace(seed=seed)
        evaluated = split or seeded.data.val_split
        protocols = [EvaluationProtocol(evaluated, (1.0,), False)]
        if several:
            protocols.append(EvaluationProtocol(evaluated, scales, True))
        return Cell(row=names[row.name], seed=seed, recipe=seeded, protocols=tuple(protocols))

    by_row = {(row.name, seed): cell(row, seed) for seed in range(seeds) for row in chosen}
    return Grid(
        name=name,
        directory=directory,
        rows=tuple(chosen),
        seeds=seeds,
        cells=tuple({cell.name: cell for cell in by_row.values()}.values()),
        by_row=by_row,
        recipe=base,
        overrides=tuple(overrides),
    )


def stored_seeds(directory: Path) -> int | None:
    """Return the largest seed of all stored cells plus one, or None without cells."""
    stems = [path.stem for path in (directory / "cells").glob("*-seed*.json")]
    found = [int(seed) for seed in (stem.rpartition("-seed")[2] for stem in stems) if seed.isdecimal()]
    return max(found) + 1 if found else None


def _base(dataset: str | None) -> str:
    assert dataset is not None
    find(dataset)
    if dataset not in BASES:
        raise CaasegError(f"no recipe is shipped for {dataset}; give one with --recipe, a name or a YAML file")
    return BASES[dataset]


def _recipe(table: str, row: Row, base: str | None, options: Sequence[str]) -> Recipe:
    if base is None:
        return load_recipe(f"{table}/{row.name}", options)
    return load_recipe(base, [*options_of(row.model), *row.options, *options])


def _own_heads(names: Sequence[str]) -> dict[str, Row]:
    """Return the rows of heads that are not built in, by file.py:Class."""
    rows: dict[str, Row] = {}
    taken = {*HEADS, *(row.name for row in TABLES["heads"].rows)}
    for head in (name for name in names if ":" in name and name not in rows):
        name = resolve_head(head).__name__
        if name in taken:
            raise CaasegError(f"--rows has {head!r}, but another row is named {name}; rename the class")
        rows[head] = Row(name=name, label=None, dataset=None, model={"head": head}, baseline="axial", note=OWN_HEAD)
        taken.add(name)
    return rows


def _chosen(names: Sequence[str] | None, rows: Sequence[Row]) -> list[Row]:
    if names is None:
        return list(rows)
    for name in names:
        if name not in {row.name for row in rows}:
            raise CaasegError(f"--rows has {name!r}; expected any of {', '.join(row.name for row in rows)}")
    return [row for row in rows if row.name in names]
