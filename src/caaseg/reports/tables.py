"""Terminal tables of datasets, benchmarks and FLOPs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from caaseg.analysis.flops import GIGA, Count, PaperRow
from caaseg.benchmarks.attention import Measurement
from caaseg.benchmarks.cpu import Timing
from caaseg.benchmarks.heads import RATIOS, HeadCosts, geometric_means, ratios
from caaseg.benchmarks.loader import Speed
from caaseg.benchmarks.model import ModelCost
from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.datasets.mask_classes import ValueCount
from caaseg.data.prepare.check import CheckResult

UNVERIFIED = (
    "The download addresses come from the documentation of other projects and are not verified; "
    "caaseg data prepare --addresses accepts other addresses"
)


def _table(title: str | None, *columns: str, left: int = 1, **options: Any) -> Table:
    """Return a table whose first `left` columns are left-aligned and all others right-aligned."""
    table = Table(title=title, title_justify="left", **options)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=index >= left)
    return table


def catalogue_table(entries: Mapping[str, DatasetInfo]) -> Table:
    """Return a table with one row per dataset: classes, official splits, image sizes, and how to get it."""
    table = Table(show_lines=True, caption=f"{UNVERIFIED}.", caption_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("contents", no_wrap=True)
    table.add_column("description, and how to get it")
    for name, entry in entries.items():
        contents = [f"{len(entry.classes) or 'any'} classes", entry.image_size]
        contents += [f"{split} {count}" for split, count in entry.counts.items()]
        table.add_row(name, "\n".join(contents), f"{entry.title}\n{entry.how}")
    return table


def findings_tables(findings: CheckResult) -> Iterator[Table]:
    """Yield a table of the splits, then a table of the class frequencies."""
    splits = _table(f"{findings.name} at {findings.root}", "split", "images", "official", "ignored pixels")
    for found in findings.splits:
        expected = "" if found.expected is None else str(found.expected)
        ignored = found.ignored / max(1, found.ignored + int(found.pixels.sum()))
        splits.add_row(found.split, str(found.images), expected, f"{ignored:.2%}")
    yield splits
    if not findings.classes:
        return
    title = "share of the labeled pixels, in %"
    frequencies = _table(title, "id", "class", *(found.split for found in findings.splits), left=2)
    frequencies.columns[0].justify = "right"
    for k, name in enumerate(findings.classes):
        shares = [100 * found.pixels[k] / max(1, found.pixels.sum()) for found in findings.splits]
        frequencies.add_row(str(k), Text(name), *(f"{share:.3f}" for share in shares))
    yield frequencies


def mask_values_table(counts: Sequence[ValueCount], number_of_masks: int) -> Table:
    """Return a table of the values or colors in masks, the most frequent first."""
    table = _table(f"values in {number_of_masks} masks", "value", "share of the pixels", "masks")
    for count in counts:
        value = str(count.value) if isinstance(count.value, int) else "#{:02x}{:02x}{:02x}".format(*count.value)
        table.add_row(value, f"{count.share:.2%}", str(count.masks))
    return table


def findings_as_json(findings: CheckResult) -> dict[str, Any]:
    """Return the result of a dataset check as plain values."""
    return {
        "dataset": findings.name,
        "root": str(findings.root),
        "splits": {
            found.split: {
                "images": found.images,
                "official": found.expected,
                "pixels": dict(zip(findings.classes, found.pixels.tolist(), strict=True)),
                "ignored_pixels": found.ignored,
            }
            for found in findings.splits
        },
        "faults": [
            {"split": fault.split, "file": str(fault.file), "problem": fault.message} for fault in findings.problems
        ],
    }


def attention_tables(measurements: Sequence[Measurement]) -> Iterator[Table]:
    """Yield one table per workload, with one row per implementation: time, peak memory and error against float64."""
    columns = ("implementation", "forward\nms", "peak\nMB", "+backward\nms", "peak\nMB", "error", "agrees")
    for (batch, height, width, dtype), group in groupby(measurements, lambda measurement: measurement.case.workload):
        table = _table(f"{batch} x {height} x {width}, {dtype}", *columns)
        for found in group:
            if found.out_of_memory:
                table.add_row(found.case.label, "out of memory")
                continue
            table.add_row(
                found.case.label,
                _number(found.forward_ms),
                _megabytes(found.forward_peak_bytes),
                _number(found.training_ms),
                _megabytes(found.training_peak_bytes),
                f"{max(found.error or 0, found.gradient_error or 0):.0e}",
                "yes" if found.agrees else Text("NO", style="bold red"),
            )
        yield table


def ratio_lines(ratios: Sequence[dict[str, Any]]) -> list[str]:
    """Return the ratios of `caaseg.benchmarks.attention.ratios` as sentences."""
    lines = []
    for record in ratios:
        workload = f"{record['batch']} x {record['height']} x {record['width']}, {record['dtype']}"
        prefix = "forward_speedup_over_grouped_"
        groups = [int(key.removeprefix(prefix)) for key in record if key.startswith(prefix)]
        if groups:  # the largest number of groups up to the paper's 16
            number = max((group for group in groups if group <= 16), default=groups[0])
            lines.append(
                f"{workload}: {record['implementation']} is {_times(record[f'{prefix}{number}'])} faster forward and "
                f"{_times(record[f'training_speedup_over_grouped_{number}'])} faster with backward than grouped with "
                f"{number} groups, which takes {_times(record[f'training_memory_of_grouped_{number}'])} its training "
                "memory"
            )
        if "training_memory_over_axial" in record:
            lines.append(
                f"{workload}: it takes {_times(record['training_time_over_axial'])} the time and "
                f"{_times(record['training_memory_over_axial'])} the memory of plain axial attention in training "
                f"({_times(record['training_memory_over_axial_without_inputs'])} without the inputs)"
            )
        if "forward_graph_over_floor" in record:
            lines.append(
                f"{workload}: the GPU time of the forward pass is {_times(record['forward_graph_over_floor'])} the "
                "time of moving the minimum number of bytes, that of forward and backward pass "
                f"{_times(record['training_graph_over_floor'])}"
            )
        if "row_by_row_over_vectorized_time" in record:
            paper = " (the paper states 2.5 and 2)" if "paper_row_by_row_over_vectorized_time" in record else ""
            lines.append(
                f"{workload}: row by row takes {_times(record['row_by_row_over_vectorized_time'])} the time of full "
                f"vectorization, which takes {_times(record['vectorized_over_row_by_row_forward_memory'])} its memory "
                f"forward and {_times(record['vectorized_over_row_by_row_training_memory'])} in training{paper}"
            )
    return lines


def loader_table(speeds: Sequence[Speed]) -> Table:
    """Return a table with one row per pipeline: images per second, median, slowest and fastest round."""
    columns = ("pipeline", "images\nper second", "slowest\nround", "fastest\nround")
    table = _table("normalized batches, one worker on one core", *columns)
    for speed in speeds:
        numbers = (speed.images_per_second, min(speed.rounds), max(speed.rounds))
        table.add_row(speed.pipeline, *(f"{number:.0f}" for number in numbers))
    return table


def model_table(costs: Sequence[ModelCost]) -> Table:
    """Return a table with one row per model: images per second and peak memory, in training and inference."""
    columns = ("model", "size", "training\nimages/s", "peak\nMB", "inference\nimages/s", "peak\nMB")
    table = _table("Whole models", *columns)
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


def head_cost_tables(costs: HeadCosts) -> Iterator[Table]:
    """Yield a table of all models, then a table per mode: our heads relative to mmsegmentation's, and the means."""
    yield model_table(list(costs.measured.values()))
    means = geometric_means(costs)
    for mode, by_head in ratios(costs).items():
        columns = ("head", "training\nimages/s", "inference\nimages/s", "training\nmemory", "inference\nmemory")
        table = _table(f"Ours / mmsegmentation's, {mode}", *columns)
        for head, found in by_head.items():
            table.add_row(head, *(_number(found.get(name)) for name in RATIOS), end_section=head == list(by_head)[-1])
        table.add_row("geometric mean", *(_number(means[mode].get(name)) for name in RATIOS))
        yield table


def cpu_table(timings: Sequence[Timing]) -> Table:
    """Return a table with one row per model and form: inference of one image on a CPU."""
    table = _table("Inference of one image", "model", "form", "fastest\nms", "median\nms", "images/s")
    for timing in timings:
        times = (f"{1000 * timing.seconds:,.1f}", f"{1000 * timing.median_s:,.1f}", _number(timing.images_per_second))
        table.add_row(timing.model, timing.form, *times)
    return table


def flops_table(counted: Count) -> Table:
    """Return the multiply-adds of each part of a model."""
    table = _table(None, "part", "G multiply-adds")
    for part in ("backbone", "head", "gates", "total"):
        table.add_row(part, f"{getattr(counted, part) / GIGA:,.3f}", end_section=part == "gates")
    table.add_row("parameters", f"{counted.parameters / 1e6:,.2f} million")
    return table


def paper_table(rows: Sequence[PaperRow]) -> Table:
    """Return the FLOPs columns of the paper next to ours, with the reasons for the differences."""
    table = Table(title="ResNet-101 at 513 x 513, G multiply-adds", title_justify="left")
    table.add_column("table", no_wrap=True)
    table.add_column("part", min_width=12)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("paper", justify="right", no_wrap=True)
    table.add_column("reason for the difference", min_width=16)
    for row in rows:
        digits = 2 if row.paper > GIGA else 5
        numbers = (f"{number / GIGA:.{digits}f}" for number in (row.ours, row.paper))
        table.add_row(row.table, row.part, *numbers, row.note, end_section=True)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f}" if value < 1e8 else f"{value / 1e6:,.0f}"


def _times(ratio: float | None) -> str:
    return "(not measured)" if ratio is None else f"{ratio:.3g} times"
