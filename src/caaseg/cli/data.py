"""`caaseg data`: get, convert, check and see datasets."""

from pathlib import Path

from caaseg.cli.terminal import console_for, progress_bars, write_json
from caaseg.cli.words import check_figure, check_writable


def data_list() -> int:
    """What datasets there are: classes, sizes, splits and how to get each."""
    from rich.console import Console

    from caaseg.data.catalogue import DATASETS
    from caaseg.reports.tables import catalogue_table

    Console().print(catalogue_table(DATASETS))
    return 0


def data_prepare(name: str, *, root: Path, addresses: str = "") -> int:
    """Fetch, verify, unpack and convert a dataset. What is there already is used; an interrupted run is repeated.

    Args:
        name: a name of caaseg data list.
        root: folder for the dataset.
        addresses: where to fetch files from instead, FILE=ADDRESS, comma-separated; the shipped ones are not verified.
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
            raise ValueError(f"--addresses has {word!r}; expected FILE=ADDRESS")
        addresses[file] = address
    return addresses


def data_check(name: str, *, root: Path, json: str | None = None) -> int:
    """Read every image and label: missing partners, damage, sizes, values, official counts, pixels of each class.

    Exit code 2 if anything is wrong.

    Args:
        name: a name of caaseg data list.
        root: folder of the dataset.
        json: file for what was found; - is standard output.
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


def data_show(name: str, *, out: Path, root: Path | None = None, split: str = "train", samples: int = 8) -> int:
    """Draw a sheet of samples with their labels laid over them and a legend.

    Args:
        name: a name of caaseg data list.
        out: file for the sheet (.png, .svg or .pdf).
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        samples: how many, spread evenly over the split.
    """
    from rich.console import Console

    from caaseg.data.catalogue import find, open_dataset
    from caaseg.drawing.sheet import draw_sheet
    from caaseg.reports.figures import save

    check_figure(out, "--out")
    if samples < 1:
        raise ValueError(f"--samples is {samples}; expected 1 or more")
    dataset = open_dataset(name, root, split)
    shown = min(samples, len(dataset))
    drawn = [dataset[k * len(dataset) // shown] for k in range(shown)]
    title = f"{find(name).title}: {shown} of the {len(dataset)} images of {split}"
    save(draw_sheet(drawn, dataset.classes, dataset.palette, title), out)
    Console().print(f"sheet: {out}", soft_wrap=True, highlight=False)
    return 0
