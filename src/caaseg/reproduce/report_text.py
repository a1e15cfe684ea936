"""Text of the report of a grid: terminal table, Markdown and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from caaseg.analysis.paired import CONFIDENCE, Difference
from caaseg.reproduce.report import GridReport, ReportRow

METHOD = (
    "Ours: mean over seeds ± sample standard deviation, in %. Differences are in points, paired over the seeds that "
    "both rows have, with confidence intervals (Student's t). The intervals are corrected for their number "
    f"(Bonferroni): with m intervals in a table, the confidence level of each is 1 - {1 - CONFIDENCE:.2f} / m. A "
    "difference counts as shown only if its interval does not contain zero. The probability that a table shows any "
    f"difference that does not exist is at most {1 - CONFIDENCE:.0%}, if rows and seeds were chosen before their "
    "results were known. Differences per class count as a separate table. One seed gives no interval."
)

MAX_CLASSES = 60
"""With more classes, differences per class are in the JSON file only."""


def grid_table(report: GridReport) -> Table:
    """Return the report as a narrow terminal table: rows by name, long cells in several lines."""
    table = Table(title=report.title, title_justify="left", show_lines=True)
    table.add_column("row", overflow="fold", min_width=12)
    for heading in ("ours", report.publisher, "difference", *_cost_headings(report)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        cells = (
            row.row + report.mark(row) + (f"\n{row.protocol}" if len(report.protocols) > 1 else ""),
            _ours(row).replace(" (", "\n("),
            _paper(row),
            "\n".join(_difference(row)).replace(": ", ":\n"),
            *_cost_cells(row, report.on_gpu),
        )
        table.add_row(*(Text(cell) for cell in cells))
    for method, number, source in report.quoted:
        table.add_row(Text(f"{method} ({source}, not run here)"), "", f"{number:.2f}")
    return table


def shown_lines(report: GridReport) -> list[str]:
    """Return sentences about the differences: per protocol those shown, those not shown, and rows not compared."""
    lines = []
    for protocol in report.protocols:
        found: dict[str, list[str]] = {"Shown": [], "No difference shown": [], "Not compared": []}
        for row in report.rows:
            if row.baseline is None or row.protocol != protocol:
                continue
            pairs = 0 if row.difference is None else row.difference.pairs
            seeds = plural(pairs, "seed")
            if row.shares_runs:
                found["Not compared"].append(f"{row.row} and {row.baseline} are the same runs")
                continue
            if row.difference is None or row.difference.low is None:
                found["Not compared"].append(f"{row.row} against {row.baseline} ({seeds}, no interval)")
                continue
            claim = row.difference.claim
            numbers = f"({100 * row.difference.mean:+.2f} points, interval {_interval(row.difference)}, {seeds})"
            if claim == "no difference shown":
                found["No difference shown"].append(f"{row.row} against {row.baseline} {numbers}")
            else:
                found["Shown"].append(f"{row.row} is {claim} than {row.baseline} {numbers}")
        if not found["Shown"] and found["No difference shown"]:
            found["Shown"] = ["nothing"]
        title = protocol[0].upper() + protocol[1:]
        lines += [f"{title}. {kind}: {'; '.join(names)}." for kind, names in found.items() if names]
    if report.class_comparisons:
        claims = [
            f"{row.row} is {difference.claim} than {row.baseline} for class {name} ({row.protocol})"
            for row in report.rows
            for name, difference in row.classes.items()
            if difference.claim != "no difference shown"
        ]
        lines.append(f"Classes. Shown: {'; '.join(claims) if claims else 'nothing'}.")
    if report.comparisons:
        lines.append(
            f"Intervals of mean IoU are corrected for {plural(report.comparisons, 'comparison')}, "
            f"intervals of classes for {plural(report.class_comparisons, 'comparison')}."
        )
    return lines


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 seed" or "3 seeds"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def report_lines(report: GridReport) -> list[str]:
    """Return the sentences below the table."""
    missing = [f"{report.missing} cells are not finished; run the same command to resume."] if report.missing else []
    times = "time: training time per image relative to the baseline."
    if report.on_gpu:
        times = "images/s: median training speed; GB: peak GPU memory of training."
    protocol = [f"Protocol: {report.protocols[0]}."] if len(report.protocols) == 1 else []
    notes = [f"[{number}] {note}" for number, note in enumerate(report.row_notes, start=1)]
    sources = dict.fromkeys(f"{row.row} {row.source}" for row in report.rows if row.source is not None)
    cited = [f"Sources: {'; '.join(sources)}."] if sources else []
    return [*missing, *notes, METHOD, *protocol, times, *cited, *report.notes]


def markdown(report: GridReport) -> str:
    """Return the report as Markdown."""
    headings = ["row", "ours", report.publisher, "difference", "interval", "shown", *_cost_headings(report)]
    rows = [headings, [":---", *["---:"] * (len(headings) - 1)]]
    for row in report.rows:
        label = f"{row.label}, {row.protocol}" if len(report.protocols) > 1 else row.label
        label += report.mark(row)
        rows.append([label, _ours(row), _paper(row), *_difference(row), *_cost_cells(row, report.on_gpu)])
    for method, number, source in report.quoted:
        quoted = [f"{method} ({source}, not run here)", "", f"{number:.2f}"]
        rows.append(quoted + [""] * (len(headings) - len(quoted)))
    table = _markdown_table(rows)
    notes = "\n".join(f"- {line}" for line in report_lines(report))
    shown = "\n".join(f"- {line}" for line in shown_lines(report))
    shown = f"## Shown differences\n\n{shown}\n\n" if shown else ""
    return f"# {report.title}\n\n{table}\n\n{shown}{_class_tables(report)}## Notes\n\n{notes}\n"


def _class_tables(report: GridReport) -> str:
    """Return the differences per class in Markdown, one table per protocol."""
    names = report.class_names
    if not 0 < len(names) <= MAX_CLASSES:
        return ""
    text = "## Differences of IoU per class\n\n"
    for protocol in report.protocols:
        rows = [["row", *names], [":---", *["---:"] * len(names)]]
        for row in report.rows:
            if row.protocol == protocol and row.classes:
                found = [row.classes.get(name) for name in names]
                rows.append([f"{row.row} to {row.baseline}", *("" if d is None else _class_cell(d) for d in found)])
        text += (
            f"{protocol[0].upper() + protocol[1:]}, in points; bold: shown differences.\n\n{_markdown_table(rows)}\n\n"
        )
    return text


def _class_cell(difference: Difference) -> str:
    text = f"{100 * difference.mean:+.2f} {_interval(difference)}"
    return text if difference.claim == "no difference shown" else f"**{text}**"


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def as_json(report: GridReport) -> dict[str, Any]:
    """Return the report as plain values. Scores are exact; speeds are included only if measured on a GPU."""
    lines = []
    for row in report.rows:
        record = asdict(row)
        record |= {"mean": row.mean, "std": row.std}
        if row.difference is not None:
            record["difference"] = {**row.difference._asdict(), "shown": row.difference.claim}
        record["classes"] = {name: {**d._asdict(), "shown": d.claim} for name, d in row.classes.items()}
        if row.cost is not None and not report.on_gpu:
            del record["cost"]["images_per_second"]
        lines.append(record)
    return {
        "title": report.title,
        "shown": shown_lines(report),
        "comparisons": report.comparisons,
        "class_comparisons": report.class_comparisons,
        "notes": report_lines(report),
        "missing_cells": report.missing,
        "lines": lines,
        "quoted": [{"method": method, "paper": number, "source": source} for method, number, source in report.quoted],
    }


def _ours(row: ReportRow) -> str:
    if row.mean is None:
        return "not finished"
    std = None if row.std is None else 100 * row.std
    number, seeds = len(row.finished), len(row.scores)
    return f"{_with_std(100 * row.mean, std)} (n {number}{f' of {seeds}' if number < seeds else ''})"


def _paper(row: ReportRow) -> str:
    return "" if row.paper is None else _with_std(row.paper, row.paper_std)


def _with_std(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _difference(row: ReportRow) -> tuple[str, str, str]:
    """Return the difference to the baseline, its interval, and the claim."""
    if row.baseline is None:
        return "", "", ""
    if row.difference is None:
        return f"to {row.baseline}:", "same runs" if row.shares_runs else "not finished", ""
    mean = 100 * row.difference.mean
    return f"to {row.baseline}: {mean:+.2f}", _interval(row.difference), row.difference.claim


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return "no interval"
    return f"[{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"


def _cost_headings(report: GridReport) -> list[str]:
    return ["images/s", "GB"] if report.on_gpu else ["time"]


def _cost_cells(row: ReportRow, on_gpu: bool) -> list[str]:
    if not on_gpu:
        return ["" if row.relative_time is None else f"{row.relative_time:.2f}"]
    speed, peak = (None, None) if row.cost is None else (row.cost.images_per_second, row.cost.peak_gpu_bytes)
    return ["" if speed is None else f"{speed:.0f}", "" if peak is None else f"{peak / 1e9:.2f}"]
