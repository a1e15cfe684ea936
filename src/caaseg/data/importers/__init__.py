"""Import label exports of annotation tools into a dataset directory with images/, masks/ and classes.yaml."""

import csv
import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml
from PIL import Image

from caaseg.config import has_surrogates
from caaseg.data.datasets.mask_classes import CLASSES_FILE
from caaseg.data.decode import read_size
from caaseg.data.importers import coco, cvat, label_studio, labelme, roboflow, voc, yolo
from caaseg.data.importers.export import Drawing, Export, LabeledImage, read_annotations
from caaseg.data.importers.shapes import MALFORMED, Overlaps
from caaseg.data.labels import MAX_CLASSES
from caaseg.data.prepare import Progress
from caaseg.data.sample import IGNORE, BadFileError
from caaseg.errors import CaasegError

FORMATS: dict[str, Callable[[Path, Path | None, Drawing], Export | None]] = {
    "coco": coco.read,
    "labelme": labelme.read,
    "cvat": cvat.read,
    "voc": voc.read,
    "roboflow": roboflow.read,
    "yolo": yolo.read,
    "label_studio": label_studio.read,
}
"""Reader of each format. A reader returns None for other formats."""


class ImportResult(NamedTuple):
    """Result of an import."""

    format: str
    classes: tuple[str, ...]
    counts: dict[str, int]
    """Number of imported images per split; the key is empty if there are no splits."""
    faults: list[str]
    """One message per image that was left out."""
    unlabeled: tuple[Path, ...]
    """Images without annotations, which were left out."""


def import_labels(
    path: Path,
    out: Path,
    *,
    file_format: str = "auto",
    images: Path | None = None,
    unlabeled: str = "background",
    overlaps: Overlaps | None = None,
    skip_faulty: bool = False,
    progress: Progress = lambda step, done, total: None,
) -> ImportResult:
    """Convert a label export to a dataset directory. Nothing is written if it fails, and nothing is overwritten.

    Args:
        path: file or directory of the export.
        out: the dataset directory to create.
        file_format: a key of FORMATS, or auto.
        images: directory of the images, if they are not in the export.
        unlabeled: class of pixels outside all polygons, or ignore.
        overlaps: which region is on top: area (the smaller one) or order (the later one); by default as in the tool.
        skip_faulty: leave out images with invalid annotations, instead of stopping.
        progress: called with ("import", done, total).

    Returns:
        The format found, the classes, the number of images per split, and the images left out.
    """
    for directory in (path, images):
        if directory is not None and not directory.exists():
            raise CaasegError(f"{directory}: no such file or directory; expected a label export")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CaasegError(f"{out}: already exists; expected a new directory, because an import overwrites nothing")
    export = read_export(path, file_format, images, Drawing(unlabeled, overlaps))
    if not export.images:
        raise BadFileError(f"{path}: an export of {export.format} without labeled images; expected at least one")
    if len(export.classes) > MAX_CLASSES:
        raise BadFileError(f"{path}: {len(export.classes)} classes; expected at most {MAX_CLASSES}")
    for name in export.classes:
        if has_surrogates(name):
            raise BadFileError(f"{path}: the class {name!r} is not valid Unicode; rename it in the annotation tool")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        partial = Path(name) / out.name
        names, faults = _write(export, partial, skip_faulty, progress)
        if not names:
            raise BadFileError(f"{faults[0]} (all {len(faults)} images are faulty)")
        try:
            if out.exists():
                out.rmdir()
            partial.rename(out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CaasegError(f"{out}: another process wrote it during this import; nothing was overwritten") from error
    splits = Counter(name.rpartition("/")[0] for name in names)
    return ImportResult(export.format, export.classes, dict(splits), faults, export.unlabeled)


def read_export(path: Path, file_format: str, images: Path | None, drawing: Drawing) -> Export:
    """Read an export in a format, or in the first format that fits."""
    if file_format != "auto" and file_format not in FORMATS:
        raise CaasegError(f"--format is {file_format!r}; expected auto or any of {', '.join(FORMATS)}")
    for name, read in FORMATS.items():
        try:
            export = read(path, images, drawing) if file_format in ("auto", name) else None
        except (BadFileError, OSError):
            raise
        except (*MALFORMED, csv.Error) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadFileError(
                f"{path}: damaged, or not in the format {name} ({reason}); export the labels again"
            ) from error
        if export is not None:
            read_annotations.cache_clear()
            left_out = [image.image for image in export.images if not image.annotated and isinstance(image.image, Path)]
            annotated = [image for image in export.images if image.annotated or isinstance(image.image, BadFileError)]
            unlabeled = tuple(sorted({*export.unlabeled, *left_out}))
            return export._replace(images=_unique(annotated), unlabeled=unlabeled)
    expected = f"an export in the format {file_format}" if file_format != "auto" else f"any of {', '.join(FORMATS)}"
    raise BadFileError(
        f"{path}: not a known label export; expected {expected}; labels of YOLO need their data.yaml; if it has images "
        "and masks of the same names, use it as it is with caaseg data init"
    )


def _unique(images: list[LabeledImage]) -> list[LabeledImage]:
    """Give the images unique names, because files such as a.jpg and a.png would share a mask."""
    seen: Counter[str] = Counter()
    result = []
    for image in images:
        seen[image.name] += 1
        number = seen[image.name]
        result.append(image if number == 1 else image._replace(name=f"{image.name}_{number}"))
    return result


def _write(export: Export, out: Path, skip_faulty: bool, progress: Progress) -> tuple[list[str], list[str]]:
    """Write images, masks and classes; return the names of the images, and messages about those left out."""
    names: list[str] = []
    faults: list[str] = []
    for done, image in enumerate(export.images, start=1):
        try:
            _write_pair(image, out)
            names.append(image.name)
        except BadFileError as error:
            faults.append(str(error))
        progress("import", done, len(export.images))
    if faults and not skip_faulty:
        more = f" ({len(faults) - 1} more images with faults)" if len(faults) > 1 else ""
        raise BadFileError(f"{faults[0]}{more}; --skip-faulty imports the other images")
    content = {"classes": list(export.classes), "ignore": [IGNORE]}
    (out / CLASSES_FILE).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return names, faults


def _write_pair(image: LabeledImage, out: Path) -> None:
    if isinstance(image.image, BadFileError):
        raise image.image
    size = read_size(image.image)
    if image.size not in (None, size):
        stated = image.size or size
        raise BadFileError(
            f"{image.image}: {size[1]} x {size[0]} pixels, but {stated[1]} x {stated[0]} in the export; expected the "
            "image that was labeled"
        )
    label = image.label(size)
    if label.shape != size:
        raise BadFileError(
            f"{image.image}: {size[1]} x {size[0]} pixels and a mask of {label.shape[1]} x {label.shape[0]}; expected "
            "the same size"
        )
    mask, copy = out / "masks" / f"{image.name}.png", out / "images" / f"{image.name}{image.image.suffix.lower()}"
    for file in (mask, copy):
        file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(label).save(mask)
    shutil.copyfile(image.image, copy)
