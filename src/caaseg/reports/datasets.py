"""Tables of datasets: what there is to have, and what a check found."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.prepare.check import CheckResult

UNVERIFIED = (
    "Addresses are those of other projects' documentation and were not verified; "
    "caaseg data prepare --addresses gives others"
)


def catalogue_table(entries: Mapping[str, DatasetInfo]) -> Table:
    """A line a dataset: classes, official splits, sizes, and how to get it."""
    table = Table(show_lines=True, caption=f"{UNVERIFIED}.", caption_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("contents", no_wrap=True)
    table.add_column("what it is, and how to get it")
    for name, entry in entries.items():
        contents = [f"{len(entry.classes) or 'any'} classes", entry.image_size]
        contents += [f"{split} {count}" for split, count in entry.counts.items()]
        table.add_row(name, "\n".join(contents), f"{entry.title}\n{entry.how}")
    return table


def findings_tables(findings: CheckResult) -> Iterator[Table]:
    """How many images each split has, then how the labelled pixels fall on the classes."""
    splits = Table(title=f"{findings.name} at {findings.root}", title_justify="left")
    for heading in ("split", "images", "official", "ignored pixels"):
        splits.add_column(heading, justify="left" if heading == "split" else "right")
    for found in findings.splits:
        expected = "" if found.expected is None else str(found.expected)
        ignored = found.ignored / max(1, found.ignored + int(found.pixels.sum()))
        splits.add_row(found.split, str(found.images), expected, f"{ignored:.2%}")
    yield splits
    if not findings.classes:
        return
    histogram = Table(title="share of the labelled pixels, in %", title_justify="left")
    histogram.add_column("id", justify="right")
    histogram.add_column("class")
    for found in findings.splits:
        histogram.add_column(found.split, justify="right")
    for k, name in enumerate(findings.classes):
        shares = [100 * found.pixels[k] / max(1, found.pixels.sum()) for found in findings.splits]
        histogram.add_row(str(k), Text(name), *(f"{share:.3f}" for share in shares))
    yield histogram


def findings_as_json(findings: CheckResult) -> dict[str, Any]:
    """The same as plain values."""
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
