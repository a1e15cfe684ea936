"""Unpack an untrusted archive: no file is written outside the target paths, and no target is ever incomplete.

Archives with links, devices, paths outside the target, an implausible size or too many members are refused.
"""

import errno
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from gzip import BadGzipFile
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from caaseg.data.prepare import Progress
from caaseg.data.sample import BadFileError

MAX_RATIO = 20
"""Largest unpacked size relative to the archive. Photos and PNG labels barely compress; zip bombs exceed 1000."""
ALWAYS_ALLOWED = 1_000_000
"""Unpacked size in bytes that even the smallest archive may have."""
MEMBER_BYTES = 512
"""Bytes counted per member in addition to its content, so that millions of empty files exceed the limit, too."""
CHUNK = 1 << 18

DAMAGED = (
    BadGzipFile,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    LZMAError,
    EOFError,
    NotImplementedError,  # unknown compression
    RuntimeError,  # encrypted
    ValueError,
)


class Member(NamedTuple):
    """One file or directory of an archive."""

    name: str
    size: int  # declared unpacked size; neither format extracts more
    is_plain: bool  # a regular file or a directory, not a link or a device
    extract: Callable[[], object]


def unpack(archive: Path, targets: Mapping[str, Path], progress: Progress) -> None:
    """Move directories or files of an archive to their target paths.

    Args:
        archive: a .zip, .tar or compressed .tar file.
        targets: target path for each directory or file in the archive; no target path may exist.
        progress: called with the position in the archive, in bytes.
    """
    temporary = archive.with_name(f".{archive.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # from an interrupted run
    temporary.mkdir()
    try:
        _extract(archive, tuple(targets), temporary, progress)
        for inside in targets:
            if not (temporary / inside).exists():
                raise BadFileError(f"{archive}: does not contain {inside}, which is needed; download it again")
        for inside, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            (temporary / inside).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract(archive: Path, wanted: tuple[str, ...], directory: Path, progress: Progress) -> None:
    archive_size = archive.stat().st_size
    limit = max(MAX_RATIO * archive_size, ALWAYS_ALLOWED)
    free = shutil.disk_usage(directory).free
    total = to_write = 0
    try:
        with open(archive, "rb") as file:
            members = _zip_members(file, directory) if archive.suffix == ".zip" else _tar_members(file, directory)
            for member in members:
                total += member.size + MEMBER_BYTES
                _check_member(member, archive)
                if total > limit:
                    raise BadFileError(
                        f"{archive}: {archive_size:,} bytes that unpack to {total:,} or more; expected at most "
                        f"{limit:,}; nothing was unpacked; get the archive from another source"
                    )
                if any(PurePosixPath(member.name).is_relative_to(inside) for inside in wanted):
                    to_write += member.size
                    if to_write > free:
                        raise OSError(errno.ENOSPC, f"{to_write:,} bytes or more to unpack, {free:,} free", archive)
                    member.extract()
                    progress(f"unpacking {archive.name}", file.tell(), archive_size)
    except BadFileError:
        raise
    except DAMAGED as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadFileError(f"{archive}: damaged ({reason}); remove it and run the same command again") from error


def _zip_members(file: IO[bytes], directory: Path) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the creating system has no file types
            is_plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
            yield Member(info.filename, info.file_size, is_plain, partial(archive.extract, info, directory))


def _tar_members(file: IO[bytes], directory: Path) -> Iterator[Member]:
    with tarfile.open(fileobj=file) as archive:
        for info in archive:
            extract = partial(archive.extract, info, directory, filter="data")
            yield Member(info.name, info.size, info.isfile() or info.isdir(), extract)
        # Read to the end of the file, where gzip and xz have the checksum of the content.
        while padding := archive.fileobj.read(CHUNK) if archive.fileobj else b"":
            yield Member("", len(padding), True, lambda: None)


def _check_member(member: Member, archive: Path) -> None:
    name = member.name.replace("\\", "/")
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or (parts and ":" in parts[0]):
        raise BadFileError(
            f"{archive}: the member {member.name!r} would be written outside the target; nothing was unpacked; "
            "expected relative paths; get the archive from another source"
        )
    if not member.is_plain:
        raise BadFileError(
            f"{archive}: the member {member.name!r} is a link or a device; nothing was unpacked; "
            "expected files and directories; get the archive from another source"
        )
