"""`caaseg reproduce`: the paper's tables again, on its data or any other."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, training_bars, write_json
from caaseg.cli.words import Device, check_folder, check_writable, device_of, factor_of, words_of
from caaseg.reproduce.tables import SCALES, TableName

PAPER_SCALES = ",".join(f"{scale:g}" for scale in SCALES)


def reproduce(
    table: TableName,
    *,
    out: Path,
    dataset: str | None = None,
    root: Path | None = None,
    recipe: str | None = None,
    rows: str | None = None,
    seeds: int = 1,
    split: str | None = None,
    multi_scale: bool = False,
    scales: str = PAPER_SCALES,
    limit_minutes: float | None = None,
    keep_runs: bool = True,
    device: Device = "auto",
    json: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Re-make a table of the paper: train and score its rows with several seeds, beside the paper's numbers.

    Finished cells (a row with a seed) are kept in OUT/cells and not run again; what was killed goes on where it was.
    Every value of the recipe can be overridden, as in caaseg train: --steps 1000, --model.backbone resnet34.

    Args:
        table: table1 to table5, state_of_the_art and appendix are the paper's; heads is every head under one recipe;
            groups is time and memory against the number of groups, and trains nothing.
        out: folder for cells/, runs/, and the table as .md, .json and .png.
        dataset: train on this dataset instead of the paper's, by one recipe for all rows in which only what the table
            studies is changed. For tables of several datasets, one of these takes its rows alone.
        root: folder of the dataset.
        recipe: that one recipe, a name or a YAML file; unless given, a shipped one of the dataset.
        rows: names of the rows to run, comma-separated; all unless given.
        seeds: how many; seeds 0, 1, ... are run one after the other, all rows of each.
        split: what final models are scored on; the recipe's val_split unless given. Choose by val, score test once.
        multi_scale: score at several scales and mirrored too; tables that the paper scored so always are.
        scales: factors of the images' size for that, comma-separated; unless given, those of the authors' code.
        limit_minutes: start no cell that would not be finished within so many minutes, judged by the finished ones.
        keep_runs: keep the runs of finished cells, with weights and checkpoints; false removes them.
        device: where to run; auto takes a GPU if there is one.
        json: file for the table's numbers; - is standard output.
        overrides: values of the recipe, as words.
    """
    check_writable(json=json)
    check_folder(out, "--out")
    if table == "groups":
        given = {"dataset": dataset, "root": root, "recipe": recipe, "rows": rows, "split": split}
        for option in (name for name, value in given.items() if value is not None):
            raise ValueError(f"--{option} is given, but groups trains nothing and reads no data; leave it out")
        if overrides:
            raise ValueError(f"{overrides[0]} is given, but groups trains nothing by a recipe; leave it out")
        return _groups(out, device, json)
    if limit_minutes is not None and limit_minutes <= 0:
        raise ValueError(f"--limit-minutes is {limit_minutes:g}; expected a number above 0")
    factors = tuple(factor_of(word, "--scales") for word in words_of(scales, "--scales"))

    from caaseg.benchmarks.provenance import provenance
    from caaseg.reproduce.grid import plan_grid
    from caaseg.reproduce.report import as_json, grid_table, report_lines, write_grid_report
    from caaseg.reproduce.runner import run_grid

    grid = plan_grid(
        table,
        out,
        dataset=dataset,
        recipe=recipe,
        root=root,
        rows=None if rows is None else words_of(rows, "--rows"),
        seeds=seeds,
        split=split,
        multi_scale=multi_scale,
        scales=factors,
        overrides=overrides,
    )
    place, console = device_of(device), console_for(json)
    origin = provenance(place, COMMAND_LINE)
    with training_bars(console) as show:
        ended = run_grid(
            grid,
            device=place,
            origin=origin,
            keep_runs=keep_runs,
            limit_s=None if limit_minutes is None else 60 * limit_minutes,
            log=lambda sentence: console.print(sentence, soft_wrap=True, highlight=False),
            progress=partial(show, "training"),
        )
    made = write_grid_report(grid, origin)
    console.print(grid_table(made))
    for sentence in report_lines(made):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    console.print(f"table: {out / table}.md, .json, .png", soft_wrap=True, highlight=False)
    if json is not None:
        write_json({**origin, "table": table, **as_json(made)}, json, console)
    if ended.left:
        why = "stopped" if ended.signal else "the time is up" if ended.out_of_time else "not finished"
        console.print(
            f"{why}: {ended.left} of {len(grid.cells)} cells are left; the same command goes on", highlight=False
        )
    return 0 if ended.signal is None else 128 + ended.signal  # as a shell says it of a command that a signal ended


def _groups(out: Path, device: Device, json: str | None) -> int:
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.tables import attention_tables, ratio_lines
    from caaseg.reproduce import groups as study

    place, console = device_of(device), console_for(json)
    origin = provenance(place, COMMAND_LINE)
    with progress_bars(console) as bars:
        outcomes = study.measure_groups(place, progress=lambda done, total: bars("measuring", done, total))
    content = study.groups_as_json(outcomes)
    study.write_groups(outcomes, out, origin)
    for found in attention_tables(outcomes):
        console.print(found)
    for line in [study.NOTE, *ratio_lines(content["ratios"])]:
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"table: {out / 'groups'}.md, .json, .png", soft_wrap=True, highlight=False)
    if json is not None:
        write_json({**origin, **content}, json, console)
    return 0
