"""Tables for the terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from caaseg.analysis.flops import GIGA, Count, PaperRow
from caaseg.benchmarks.attention import Outcome
from caaseg.benchmarks.loader import Speed
from caaseg.benchmarks.model import ModelCost


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
    table = Table(title="normalized batches, one worker on one core", title_justify="left")
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
                f"{place}: {record['implementation']} is {_times(record[f'forward_speedup_over_{name}'])} faster "
                f"forward and {_times(record[f'training_speedup_over_{name}'])} with backward than "
                f"grouped with {name[8:]}, which takes "
                f"{_times(record[f'training_memory_of_{name}'])} its training memory"
            )
        if "training_memory_over_axial" in record:
            lines.append(
                f"{place}: it takes {_times(record['training_time_over_axial'])} the time and "
                f"{_times(record['training_memory_over_axial'])} the memory of plain axial attention in training "
                f"({_times(record['training_memory_over_axial_without_inputs'])} without the inputs)"
            )
        if "forward_graph_over_floor" in record:
            lines.append(
                f"{place}: the GPU's time forward is {_times(record['forward_graph_over_floor'])} that of moving the "
                "bytes that must be moved"
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


def flops_table(counted: Count) -> Table:
    """Multiply-adds by part."""
    table = Table()
    table.add_column("part")
    table.add_column("G multiply-adds", justify="right")
    for part in ("backbone", "head", "gates", "total"):
        if part == "total":
            table.add_section()
        table.add_row(part, f"{getattr(counted, part) / GIGA:,.3f}")
    table.add_row("parameters", f"{counted.parameters / 1e6:,.2f} million")
    return table


def paper_table(rows: Sequence[PaperRow]) -> Table:
    """The paper's FLOPs columns beside ours, each with what explains the difference."""
    table = Table(title="ResNet-101 at 513 x 513, G multiply-adds", title_justify="left")
    table.add_column("table", no_wrap=True)
    table.add_column("what", min_width=12)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("paper", justify="right", no_wrap=True)
    table.add_column("why they differ", min_width=16)
    for row in rows:
        digits = 2 if row.paper > GIGA else 5
        table.add_row(
            row.table,
            row.what,
            f"{row.ours / GIGA:.{digits}f}",
            f"{row.paper / GIGA:.{digits}f}",
            row.note,
            end_section=True,
        )
    return table


def model_table(costs: Sequence[ModelCost]) -> Table:
    """A line a model: images a second and peak memory, in training and in inference."""
    table = Table(title="Whole models", title_justify="left")
    table.add_column("model")
    for heading in ("size", "training\nimages/s", "peak\nMB", "inference\nimages/s", "peak\nMB"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            cost.model,
            "{} x {}".format(*cost.size),
            _number(cost.training_images_per_second),
            _megabytes(cost.training_peak_bytes),
            _number(cost.inference_images_per_second),
            _megabytes(cost.inference_peak_bytes),
        )
    return table
