"""Description of a dataset for the catalogue: classes, official counts, and how to get its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from caaseg.data.prepare.convert import ConversionJob
from caaseg.data.sample import Color, SegmentationDataset


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A file published by the authors of a dataset."""

    file: str
    """Path below the root."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Target path below the root for each directory in the archive. Empty for a file that is not unpacked."""
    address: str | None = None
    """Download address from other projects' documentation, not verified. None if a login is needed."""
    page: str = ""
    """Web page for downloading by hand."""
    sha1: str | None = None
    """Checksum, if known."""
    max_gigabytes: int
    """Largest plausible size; a larger download is an error."""
    optional: bool = False
    """Used if the file exists, and downloaded only on request."""
    replaced_by: tuple[str, ...] = ()
    """Paths below the root; if any exists, this file is not needed."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Entry of the catalogue."""

    title: str
    open: Callable[..., SegmentationDataset]
    """Opens a split from root and split name."""
    has_files: bool = True
    """False for a dataset without files, which needs no root."""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty if they depend on the files."""
    palette: tuple[Color, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Official number of images per split."""
    splits: Callable[[Path], tuple[str, ...]] | None = None
    """Returns the splits of a root; None if they are the keys of `counts`."""
    image_size: str
    """Width x height."""
    how: str
    """How to get its files, in a few words."""
    archives: tuple[Archive, ...] = ()
    conversion: Callable[[Path], ConversionJob | None] | None = None
    """Returns the conversion that a root still needs, or None."""
