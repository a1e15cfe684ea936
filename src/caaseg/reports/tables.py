"""Tables for the terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from caaseg.evaluation.benchmark import Outcome
from caaseg.evaluation.loader_benchmark import Speed


def attention_tables(outcomes: Sequence[Outcome]) -> Iterator[Table]:
    """A table a size and dtype, a line an implementation: time, peak memory, and the larger distance from float64."""
    for (batch, height, width, dtype), here in groupby(outcomes, lambda o: o.case.place):
        table = Table(title=f"{batch} x {height} x {width}, {dtype}", title_justify="left")
        table.add_column("implementation", no_wrap=True)
        for heading in ("forward\nms", "peak\nMB", "+backward\nms", "peak\nMB", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("agrees", no_wrap=True)
        for outcome in here:
            if outcome.out_of_memory:
                table.add_row(outcome.case.label, "out of memory")
                continue
            table.add_row(
                outcome.case.label,
                _number(outcome.forward_ms),
                _megabytes(outcome.forward_peak_bytes),
                _number(outcome.training_ms),
                _megabytes(outcome.training_peak_bytes),
                f"{max(outcome.error or 0, outcome.gradient_error or 0):.0e}",
                "yes" if outcome.agrees else "[bold red]NO[/]",
            )
        yield table


def loader_table(speeds: Sequence[Speed]) -> Table:
    """A line a pipeline: images a second, and the slowest and the fastest turn."""
    table = Table(title="normalised batches, one worker on one core", title_justify="left")
    table.add_column("pipeline", no_wrap=True)
    for heading in ("images\na second", "slowest\nturn", "fastest\nturn"):
        table.add_column(heading, justify="right", no_wrap=True)
    for speed in speeds:
        numbers = (speed.images_per_second, min(speed.rounds), max(speed.rounds))
        table.add_row(speed.pipeline, *(f"{number:.0f}" for number in numbers))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f}" if value < 1e8 else f"{value / 1e6:,.0f}"


def ratio_lines(ratios: Sequence[dict[str, Any]]) -> list[str]:
    """What the numbers say, in a sentence or two a size."""
    lines = []
    for record in ratios:
        place = f"{record['batch']} x {record['height']} x {record['width']}, {record['dtype']}"
        groups = [name.removeprefix("forward_speedup_over_") for name in record if name.startswith("forward_speedup_")]
        groups = [name for name in groups if name.startswith("grouped_")]
        if groups:  # the largest number of groups up to the paper's 16
            name = max((g for g in groups if int(g[8:]) <= 16), key=lambda g: int(g[8:]), default=groups[0])
            lines.append(
                f"{place}: factorised is {_times(record[f'forward_speedup_over_{name}'])} faster forward and "
                f"{_times(record[f'training_speedup_over_{name}'])} with backward than grouped with {name[8:]}, which "
                f"takes {_times(record[f'training_memory_of_{name}'])} its training memory"
            )
        if "training_memory_over_axial" in record:
            lines.append(
                f"{place}: it takes {_times(record['training_time_over_axial'])} the time and "
                f"{_times(record['training_memory_over_axial'])} the memory of plain axial attention in training"
            )
        if "row_by_row_over_vectorized_time" in record:
            paper = " (the paper says 2.5 and 2)" if "paper_row_by_row_over_vectorized_time" in record else ""
            lines.append(
                f"{place}: row by row takes {_times(record['row_by_row_over_vectorized_time'])} the time of full "
                f"vectorization, which takes {_times(record['vectorized_over_row_by_row_forward_memory'])} its memory "
                f"forward and {_times(record['vectorized_over_row_by_row_training_memory'])} in training{paper}"
            )
    return lines


def _times(ratio: float | None) -> str:
    return "(not measured)" if ratio is None else f"{ratio:.3g} times"
