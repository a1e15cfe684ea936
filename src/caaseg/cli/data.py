"""`caaseg data`: list, prepare, check and show datasets."""

from pathlib import Path
from shlex import quote
from typing import Literal

from caaseg.cli.arguments import Figure, check_writable
from caaseg.cli.terminal import console_for, progress_bars, write_json
from caaseg.config import Count
from caaseg.errors import CaasegError


def data_list() -> int:
    """List the datasets with their classes, sizes, splits and how to get them."""
    from caaseg.data.catalogue import DATASETS
    from caaseg.reports.tables import catalogue_table

    console_for(None).print(catalogue_table(DATASETS))
    return 0


def data_init(root: Path) -> int:
    """Inspect the masks of your own data: list their values or colors, and write a classes.yaml to edit.

    Args:
        root: directory with images/ and masks/.
    """
    from caaseg.data.datasets.folder import find_images, find_masks, find_parts
    from caaseg.data.datasets.mask_classes import CLASSES_FILE, classes_text, count_values
    from caaseg.files import atomic_write
    from caaseg.reports.tables import mask_values_table

    file = root / CLASSES_FILE
    if file.exists():
        raise CaasegError(f"{file}: already exists; edit it, or rename it to write a new one")
    parts = find_parts(root)
    masks = list(find_masks(parts, find_images(parts)).values())
    if not masks:
        raise CaasegError(f"{parts[0].masks}: no masks found; expected PNG files; see caaseg data import")
    counts = count_values(masks)
    text = classes_text(counts, len(masks))
    with atomic_write(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    console = console_for(None)
    console.print(mask_values_table(counts, len(masks)))
    console.print(f"classes: {file}; rename the classes in it", soft_wrap=True, highlight=False, markup=False)
    return 0


def data_import(
    path: Path,
    *,
    out: Path,
    format: Literal["auto", "coco", "labelme", "cvat", "voc", "roboflow", "yolo", "label_studio"] = "auto",
    images: Path | None = None,
    unlabeled: str = "background",
    overlaps: Literal["area", "order"] | None = None,
    skip_faulty: bool = False,
) -> int:
    """Convert a label export to a dataset directory: COCO, Labelme, CVAT, VOC, Roboflow, YOLO or Label Studio.

    Args:
        path: file or directory of the export.
        out: the dataset directory to create.
        format: format of the export; auto detects it.
        images: directory of the images, if they are not in the export.
        unlabeled: class of pixels outside all polygons, or ignore.
        overlaps: region on top where several overlap: the smaller one (area) or the later one (order); by default as
            in the annotation tool.
        skip_faulty: leave out images with invalid annotations, instead of stopping.
    """
    from caaseg.data.importers import import_labels
    from caaseg.data.labels import abbreviate

    console = console_for(None)
    with progress_bars(console) as report:
        result = import_labels(
            path,
            out,
            file_format=format,
            images=images,
            unlabeled=unlabeled,
            overlaps=overlaps,
            skip_faulty=skip_faulty,
            progress=report,
        )
    for fault in result.faults:
        console.print(f"left out: {fault}", style="red", soft_wrap=True, highlight=False, markup=False)
    if result.unlabeled:
        names = abbreviate([str(path) for path in result.unlabeled])
        text = f"images without annotations, left out: {len(result.unlabeled)} ({names})"
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    counts = ", ".join(f"{number} images{f' of {split}' if split else ''}" for split, number in result.counts.items())
    text = f"{result.format}: {counts}, {len(result.classes)} classes ({', '.join(result.classes)})"
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    text = f"dataset: {out}; see caaseg data check folder --root {quote(str(out))}"
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    return 0


def data_prepare(name: str, *, root: Path, optional: bool = False, addresses: str = "") -> int:
    """Download, verify, unpack and convert a dataset. Existing files are used; an interrupted run can be repeated.

    Args:
        name: dataset name (see caaseg data list).
        root: directory for the dataset.
        optional: download optional files too: for voc2012 the labels of SBD, which split train_aug needs.
        addresses: other URLs to download files from, FILE=URL, comma-separated.
    """
    from caaseg.data.prepare.pipeline import prepare

    console = console_for(None)
    with progress_bars(console) as report:
        prepare(name, root, optional=optional, addresses=_addresses(addresses), progress=report)
    text = f"prepared: {root}; see caaseg data check {name} --root {quote(str(root))}"
    console.print(text, soft_wrap=True, highlight=False)
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

    check_writable([root], json=json)
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
        split: name of a split, such as train or val (see caaseg data list).
        samples: number of samples, spread evenly over the split.
    """
    from caaseg.data.catalogue import find, open_dataset
    from caaseg.drawing.sheet import draw_sheet
    from caaseg.reports.figures import save

    check_writable([root], out=out)
    dataset = open_dataset(name, root, split)
    shown = min(samples, len(dataset))
    drawn = [dataset[k * len(dataset) // shown] for k in range(shown)]
    title = f"{find(name).title}: {shown} of the {len(dataset)} images of {split}"
    save(draw_sheet(drawn, dataset.classes, dataset.palette, title), out)
    console_for(None).print(f"sheet: {out}", soft_wrap=True, highlight=False)
    return 0
