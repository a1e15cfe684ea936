"""`caaseg data`: list, prepare, check and show datasets."""

from pathlib import Path

from caaseg.cli.arguments import Figure, check_writable
from caaseg.cli.terminal import console_for, progress_bars, write_json
from caaseg.config import Count
from caaseg.errors import CaasegError


def data_list() -> int:
    """List the datasets with their classes, sizes, splits and how to get them."""
    from rich.console import Console

    from caaseg.data.catalogue import DATASETS
    from caaseg.reports.tables import catalogue_table

    Console().print(catalogue_table(DATASETS))
    return 0


def data_prepare(name: str, *, root: Path, addresses: str = "") -> int:
    """Download, verify, unpack and convert a dataset. Existing files are used; an interrupted run can be repeated.

    Args:
        name: dataset name (see caaseg data list).
        root: directory for the dataset.
        addresses: other URLs to download files from, FILE=URL, comma-separated.
    """
    from rich.console import Console

    from caaseg.data.prepare.pipeline import prepare

    console = Console()
    with progress_bars(console) as report:
        prepare(name, root, addresses=_addresses(addresses), progress=report)
    console.print(f"prepared: {root}; see caaseg data check {name} --root {root}", soft_wrap=True, highlight=False)
    return 0


def _addresses(text: str) -> dict[str, str]:
    addresses = {}
    for word in (word.strip() for word in text.split(",") if word.strip()):
        file, equals, address = word.partition("=")
        if not equals or not file or not address:
            raise CaasegError(f"--addresses has {word!r}; expected FILE=URL")
        addresses[file] = address
    return addresses


def data_check(name: str, *, root: Path, json: str | None = None) -> int:
    """Check every image and label of a dataset: missing and damaged files, sizes, values, counts, pixels per class.

    The exit code is 2 if there is any fault.

    Args:
        name: dataset name (see caaseg data list).
        root: directory of the dataset.
        json: file for the results; - is standard output.
    """
    from caaseg.data.prepare.check import check
    from caaseg.reports.tables import findings_as_json, findings_tables

    check_writable(json=json)
    console = console_for(json)
    with progress_bars(console) as report:
        findings = check(name, root, report)
    for table in findings_tables(findings):
        console.print(table)
    for fault in findings.problems:
        console.print(f"{fault.split}: {fault.message}", style="red", soft_wrap=True, highlight=False, markup=False)
    number = len(findings.problems)
    console.print("no fault" if number == 0 else f"{number} fault{'s' * (number > 1)}", highlight=False)
    if json is not None:
        write_json(findings_as_json(findings), json, console)
    return 2 if findings.problems else 0


def data_show(name: str, *, out: Figure, root: Path | None = None, split: str = "train", samples: Count = 8) -> int:
    """Draw samples of a dataset with label overlays and a legend.

    Args:
        name: dataset name (see caaseg data list).
        out: file for the figure (.png, .svg or .pdf).
        root: directory of the dataset; scenes need none.
        split: train, val or test.
        samples: number of samples, spread evenly over the split.
    """
    from rich.console import Console

    from caaseg.data.catalogue import find, open_dataset
    from caaseg.drawing.sheet import draw_sheet
    from caaseg.reports.figures import save

    dataset = open_dataset(name, root, split)
    shown = min(samples, len(dataset))
    drawn = [dataset[k * len(dataset) // shown] for k in range(shown)]
    title = f"{find(name).title}: {shown} of the {len(dataset)} images of {split}"
    save(draw_sheet(drawn, dataset.classes, dataset.palette, title), out)
    Console().print(f"sheet: {out}", soft_wrap=True, highlight=False)
    return 0
