"""Folders out of an archive that may be anything: nothing is ever written outside, and each appears whole.

Only plain files and folders are taken. A member that is a link or a device, or whose name leads elsewhere, condemns the
archive: those the project knows have none.
"""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from caaseg.data.prepare.convert import Report
from caaseg.data.sample import BadFileError

DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    LZMAError,
    EOFError,
    NotImplementedError,  # a compression Python does not know
    RuntimeError,  # a password
    ValueError,
)


class Member(NamedTuple):
    """One entry of an archive."""

    name: str
    plain: bool  # a file or a folder, not a link or a device
    open: Callable[[], IO[bytes]] | None  # None for a folder


def unpack(archive: Path, wanted: Mapping[str, Path], report: Report) -> None:
    """Bring folders of an archive to their places.

    Args:
        archive: a .zip, .tar or compressed .tar file.
        wanted: for each folder, or file, inside the archive its place outside; none of the places may exist.
        report: told how far into the archive it is, in bytes.
    """
    aside = archive.with_name(f".{archive.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # an interrupted run's
    aside.mkdir()
    try:
        _extract(archive, tuple(wanted), aside, report)
        for inside in wanted:
            if not (aside / inside).exists():
                raise BadFileError(f"{archive}: no {inside} in it; expected that of the archive; fetch it again")
        for inside, place in wanted.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            (aside / inside).rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _extract(archive: Path, wanted: tuple[str, ...], folder: Path, report: Report) -> None:
    size = archive.stat().st_size
    try:
        with open(archive, "rb") as opened:
            for member in _zip_members(opened) if archive.suffix == ".zip" else _tar_members(opened):
                _refuse(member, archive)
                path = PurePosixPath(member.name)
                if not any(path.is_relative_to(inside) for inside in wanted):
                    continue
                target = folder / path
                if member.open is None:
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                report(f"unpacking {archive.name}", opened.tell(), size)
    except BadFileError:
        raise
    except DAMAGE as error:
        raise BadFileError(
            f"{archive}: damaged ({type(error).__name__}: {error}); remove it and run the same command again"
        ) from error


def _zip_members(archive: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where the maker's system has no such thing
            plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
            yield Member(info.filename, plain, None if info.is_dir() else partial(opened.open, info))


def _tar_members(archive: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=archive) as opened:
        for entry in opened:
            plain = entry.isfile() or entry.isdir()
            yield Member(entry.name, plain, None if entry.isdir() else partial(_opened, opened, entry))


def _opened(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(entry)
    assert file is not None  # it is so for folders and devices alone
    return file


def _refuse(member: Member, archive: Path) -> None:
    name = member.name.replace("\\", "/")
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or (parts and ":" in parts[0]):
        raise BadFileError(
            f"{archive}: a member called {member.name!r} would be written outside; nothing was unpacked; "
            "expected names below the archive's own folder; fetch it from another place"
        )
    if not member.plain:
        raise BadFileError(
            f"{archive}: the member {member.name!r} is a link or a device; nothing was unpacked; "
            "expected files and folders; fetch it from another place"
        )
