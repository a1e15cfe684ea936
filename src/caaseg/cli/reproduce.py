"""`caaseg reproduce`: train and evaluate the rows of the paper's tables."""

from functools import partial
from pathlib import Path

from caaseg.cli.arguments import Device, Names, Overrides, Positive, Scales, check_directory, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, training_progress, write_json
from caaseg.config import Count
from caaseg.errors import CaasegError
from caaseg.reproduce.tables import SCALES, TableName


def reproduce(
    table: TableName,
    *,
    out: Path,
    dataset: str | None = None,
    root: Path | None = None,
    recipe: str | None = None,
    rows: Names | None = None,
    seeds: Count | None = None,
    split: str | None = None,
    multi_scale: bool = False,
    scales: Scales = SCALES,
    limit_minutes: Positive | None = None,
    keep_runs: bool = True,
    report_only: bool = False,
    device: Device = "auto",
    json: str | None = None,
    overrides: Overrides = (),
) -> int:
    """Train and evaluate the rows of a table of the paper with several seeds, and report them next to its numbers.

    Finished cells (a row with a seed) are stored in OUT/cells and not run again; interrupted runs are resumed. Every
    value of the recipe is an option, as in caaseg train: --steps 1000, --model.backbone resnet34.

    Args:
        table: table1 to table5, state_of_the_art and appendix are the paper's; result_figure trains the models of its
            result figures; car compares heads without and with class-aware regularization; ade20k and voc2012 compare
            heads with ResNet-101 in the settings of mmsegmentation; heads compares all heads with one recipe;
            camvid_ideas compares changes of one recipe for CamVid; groups measures time and memory against the number
            of groups, without training.
        out: directory for cells/, runs/, TABLE.md, .json and .png, and TABLE-classes.png with differences per class.
        dataset: train all rows on this dataset with one recipe, instead of on the paper's. If the table has several
            datasets and this is one of them, only its rows are run.
        root: directory of the dataset.
        recipe: recipe of all rows, a name or a YAML file; by default a shipped recipe of the dataset.
        rows: names of the rows to run; by default all. For heads, file.py:Class is a head of your own.
        seeds: number of seeds, numbered from 0; by default 5 on the paper's dataset, otherwise 1. All rows are run
            with one seed before the next.
        split: split to evaluate on; by default the recipe's val_split. Select on val, and evaluate on test once.
        multi_scale: also evaluate at several scales with flips; always done if the paper's table does.
        scales: scales of that evaluation; by default those of the authors' code.
        limit_minutes: do not start a cell that would not finish within this time, estimated from the finished ones.
        keep_runs: keep the runs of finished cells, with weights and checkpoints; false deletes them.
        report_only: train nothing, and report the finished cells in OUT; rows may have different numbers of seeds.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        json: file for the table's numbers; - is standard output.
        overrides: options of the recipe.
    """
    check_writable(json=json)
    check_directory(out, "--out")
    if table == "groups":
        given = {
            "dataset": dataset,
            "root": root,
            "recipe": recipe,
            "rows": rows,
            "split": split,
            "report-only": report_only or None,
        }
        for option in (name for name, value in given.items() if value is not None):
            raise CaasegError(f"--{option} is given, but groups trains nothing and reads no data; leave it out")
        if overrides:
            option = overrides[0].partition("=")[0]
            raise CaasegError(f"{option} is given, but groups trains nothing with a recipe; leave it out")
        return _groups(out, device, json)

    from caaseg.benchmarks.provenance import provenance
    from caaseg.reproduce.grid import plan_grid, stored_seeds
    from caaseg.reproduce.report_files import write_grid_report
    from caaseg.reproduce.report_text import as_json, grid_table, report_lines, shown_lines
    from caaseg.reproduce.runner import GridStatus, finished_grid, run_grid

    grid = plan_grid(
        table,
        out,
        dataset=dataset,
        recipe=recipe,
        root=root,
        rows=rows,
        seeds=seeds or (stored_seeds(out) if report_only else None),
        split=split,
        multi_scale=multi_scale,
        scales=scales,
        overrides=overrides,
    )
    torch_device, console = device_of(device), console_for(json)
    origin = provenance(torch_device, COMMAND_LINE)
    if report_only:
        grid, ended = finished_grid(grid), GridStatus(0, None, False)
    else:
        with training_progress(console) as show:
            ended = run_grid(
                grid,
                device=torch_device,
                origin=origin,
                keep_runs=keep_runs,
                limit_s=None if limit_minutes is None else 60 * limit_minutes,
                log=lambda line: console.print(line, soft_wrap=True, highlight=False),
                progress=partial(show, "training"),
            )
    made = write_grid_report(grid, origin)
    console.print(grid_table(made))
    for line in [*shown_lines(made), *report_lines(made)]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"table: {out / table}.md, .json, .png", soft_wrap=True, highlight=False)
    if json is not None:
        write_json({**origin, "table": table, **as_json(made)}, json, console)
    if ended.left:
        why = "stopped" if ended.signal else "the time is up" if ended.out_of_time else "not finished"
        console.print(
            f"{why}: {ended.left} of {len(grid.cells)} cells are left; run the same command to continue",
            highlight=False,
        )
    return 0 if ended.signal is None else 128 + ended.signal  # as shells report a command that a signal ended


def _groups(out: Path, device: str, json: str | None) -> int:
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.tables import attention_tables, ratio_lines
    from caaseg.reproduce import groups as study

    torch_device, console = device_of(device), console_for(json)
    origin = provenance(torch_device, COMMAND_LINE)
    with progress_bars(console) as bars:
        outcomes = study.measure_groups(torch_device, progress=lambda done, total: bars("measuring", done, total))
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
