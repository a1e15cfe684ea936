"""A label export in memory: its classes and images, whatever its file format."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES
from caaseg.data.importers.shapes import Overlaps, Region, draw_regions
from caaseg.data.sample import IGNORE, BadFileError

BACKGROUND = ("background", "_background_", "unlabeled", "unlabelled")
SPLIT = re.compile(r"(?<![a-z])(train|training|val|valid|validation|test)(?![a-z])")


class LabeledImage(NamedTuple):
    """One image of an export."""

    name: str
    """Path below images/ without suffix, such as train/0001."""
    image: Path | BadFileError
    """The file, or the reason why it was not found."""
    label: Callable[[tuple[int, int]], NDArray[np.uint8]]
    """Returns the class ids, (H, W), given height and width. Raises BadFileError if the annotation is invalid."""
    size: tuple[int, int] | None = None
    """Height and width in the export, if it has them."""
    annotated: bool = True
    """Whether the export has an annotation of the image."""


class Export(NamedTuple):
    """A label export."""

    format: str
    classes: tuple[str, ...]
    """Names in the order of class ids."""
    images: list[LabeledImage]
    unlabeled: tuple[Path, ...] = ()
    """Images without annotations, which are not imported."""


class Drawing(NamedTuple):
    """Settings for exports that list regions."""

    unlabeled: str
    """Name of the class of pixels outside all regions, or "ignore"."""
    overlaps: Overlaps | None
    """Which region is on top; None for the default of the format."""

    def classes(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the class names: first the class of unlabeled pixels, then the classes of the export."""
        if self.unlabeled == "ignore":
            return tuple(names)
        own = next((name for name in names if name.lower() in (self.unlabeled.lower(), *BACKGROUND)), self.unlabeled)
        return (own, *(name for name in names if name != own))

    def label(
        self, regions: Sequence[Region], classes: Sequence[str], *, default: Overlaps
    ) -> Callable[[tuple[int, int]], NDArray[np.uint8]]:
        """Return a function that draws the label map of an image; `default` is the order of the format."""
        return partial(
            draw_regions,
            tuple(regions),
            {name: k for k, name in enumerate(classes)},
            unlabeled=IGNORE if self.unlabeled == "ignore" else 0,
            overlaps=self.overlaps or default,
        )


class ImageFiles:
    """Finds the image files that an export names, even if it was moved, or the names differ in case or Unicode form.

    Args:
        roots: directories to search, in this order.
    """

    def __init__(self, *roots: Path | None) -> None:
        self._roots = [root for root in roots if root is not None]
        self._by_name: dict[str, list[Path]] | None = None

    def find(self, name: str, source: str) -> Path | BadFileError:
        """Return the file of an image name, or an error that starts with `source` if there is none or more than one."""
        relative = Path(name.replace("\\", "/"))
        for root in self._roots:
            for candidate in (root / relative, root / "images" / relative):
                if ".." not in relative.parts and not relative.is_absolute() and candidate.is_file():
                    return candidate
        found = self._named(relative.name)
        if len(found) != 1:
            problem = "no such image file" if not found else f"{len(found)} image files of this name"
            searched = " and ".join(map(str, self._roots))
            return BadFileError(f"{source}: {problem}: {name!r}; searched {searched}; give its directory with --images")
        return found[0]

    def others(self, images: Iterable[LabeledImage]) -> tuple[Path, ...]:
        """Return the image files that are not among these images."""
        used = {image.image.resolve() for image in images if isinstance(image.image, Path)}
        return tuple(path for path in self._files() if path.resolve() not in used)

    def _named(self, name: str) -> list[Path]:
        if self._by_name is None:
            self._by_name = {}
            for path in self._files():
                self._by_name.setdefault(_plain_name(path.name), []).append(path)
        found = self._by_name.get(_plain_name(name), [])
        return [path for path in found if path.name == name] or found

    def _files(self) -> list[Path]:
        paths = sorted({path for root in self._roots for path in root.rglob("*")})
        return [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]


def _plain_name(name: str) -> str:
    """Return a name in lower case and in one Unicode form: file systems and archives change both."""
    return unicodedata.normalize("NFC", name).casefold()


def split_of(*names: str) -> str:
    """Return train, val or test if one of these file or directory names contains it, else an empty text."""
    for name in names:
        if match := SPLIT.search(name.lower()):
            return {"t": "test" if match[1] == "test" else "train", "v": "val"}[match[1][0]]
    return ""


def sample_name(split: str, image: str | Path) -> str:
    """Return the name of an image in the imported dataset: its split and its stem."""
    stem = Path(str(image).replace("\\", "/")).stem
    return f"{split}/{stem}" if split else stem


@cache
def read_annotations(path: Path) -> Any:
    """Return the content of a JSON file of an export, cached because several readers look at it."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadFileError(f"{path}: cannot be read as JSON ({error}); export the labels again") from error


def json_files(path: Path) -> Iterator[Path]:
    """Yield the JSON files of an export: the file itself, or those up to two levels below a directory."""
    if path.is_file():
        yield from [path] if path.suffix.lower() == ".json" else []
    else:
        for pattern in ("*.json", "*/*.json", "*/*/*.json"):
            yield from (file for file in sorted(path.glob(pattern)) if file.is_file())  # reading a pipe would block
