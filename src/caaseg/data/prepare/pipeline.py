"""Prepare a dataset: download, verify, unpack and convert what is missing.

Files and directories get their final name when they are complete. If that name exists, the step is done, so that an
interrupted run can simply be repeated.
"""

import errno
from collections.abc import Mapping
from pathlib import Path

from caaseg.data.catalogue import find, open_dataset
from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.prepare import Progress
from caaseg.data.prepare.convert import convert
from caaseg.data.prepare.download import check_sha1, download
from caaseg.data.prepare.unpack import unpack
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from caaseg.files import lock_name


def prepare(name: str, root: Path, *, optional: bool = False, addresses: Mapping[str, str], progress: Progress) -> None:
    """Download, verify, unpack and convert a dataset.

    Args:
        name: name in the catalogue.
        root: directory of the dataset.
        optional: download optional archives too. Those with an address in `addresses` are always downloaded.
        addresses: download addresses by file name that replace those of the catalogue.
        progress: called in every step.
    """
    info = find(name)
    files = [Path(archive.file).name for archive in info.archives]
    for file in addresses:
        if file not in files:
            raise CaasegError(f"--addresses has {file!r}; expected any of {', '.join(files) or 'none'} for {name}")
    sources = _sources(info, optional, addresses)
    has_optional = any(archive.optional and archive.file in sources for archive in info.archives)
    if optional and not has_optional:
        raise CaasegError(f"--optional is set, but {name} has no optional files to download; leave it out")
    if info.has_files and is_ready(name, root, optional=has_optional):
        return
    if not info.archives:
        raise CaasegError(f"{name} has nothing to download; {info.how}")
    try:
        prepare_files(info, root, optional=optional, addresses=addresses, progress=progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"{root}: no space left for {error.filename or 'the next file'} ({error.strerror}); free some and run the "
            "same command again to resume"
        ) from error
    try:
        _open_splits(name, root, has_optional)
    except CaasegError as error:  # a directory of an archive existed before, and its content is not that of the archive
        raise BadFileError(
            f"{root}: {name} is not complete ({error}); move the directory of that file elsewhere, and run the same "
            "command again to unpack the archive"
        ) from error


def is_ready(name: str, root: Path, *, optional: bool = False) -> bool:
    """Return whether every split opens and has all its files; `optional` includes splits of optional archives."""
    try:
        return _open_splits(name, root, optional) > 0
    except (CaasegError, OSError):
        return False


def _open_splits(name: str, root: Path, optional: bool) -> int:
    """Open every split, which checks that its files exist; return the number of splits."""
    info = find(name)
    names = [split for split in info.counts if optional or info.splits is None or split in info.splits(root)]
    return len([open_dataset(name, root, split) for split in names])


def _sources(info: DatasetInfo, optional: bool, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the address of each archive that may be downloaded, by its path below the root."""
    sources = {}
    for archive in info.archives:
        given = addresses.get(Path(archive.file).name)
        address = given or (archive.address if optional or not archive.optional else None)
        if address is not None:
            sources[archive.file] = address
    return sources


def prepare_files(
    info: DatasetInfo, root: Path, *, optional: bool = False, addresses: Mapping[str, str], progress: Progress
) -> None:
    """Download, verify, unpack and convert the files of a dataset that are missing.

    Args:
        info: catalogue entry of the dataset.
        root: directory of the dataset.
        optional: download optional archives too. Those with an address in `addresses` are always downloaded.
        addresses: download addresses by file name that replace those of the entry.
        progress: called in every step.
    """
    sources = _sources(info, optional, addresses)
    needed = [archive for archive in info.archives if _is_needed(archive, root, sources)]
    by_hand = [
        root / archive.file for archive in needed if archive.file not in sources and not (root / archive.file).exists()
    ]
    if by_hand:
        raise CaasegError(
            f"{info.title} needs a login to download: get {' and '.join(path.name for path in by_hand)} from "
            f"{needed[0].page}, put them at {' and '.join(map(str, by_hand))}, and run the same command again"
        )
    root.mkdir(parents=True, exist_ok=True)
    with lock_name(root, "prepare", wait=False) as is_locked:
        if not is_locked:
            raise CaasegError(f"{root}: another process is preparing this directory; wait until it ends")
        for archive in needed:
            file = root / archive.file
            if not _is_needed(archive, root, sources):  # an archive that was unpacked before replaces it
                continue
            if file.exists():
                check_sha1(file, archive.sha1, progress)
            else:
                max_bytes = archive.max_gigabytes * 10**9
                download(sources[archive.file], file, sha1=archive.sha1, progress=progress, max_bytes=max_bytes)
            if missing := _missing(archive, root):
                unpack(file, missing, progress)
        if info.conversion and (job := info.conversion(root)):
            convert(job, progress)


def _is_needed(archive: Archive, root: Path, sources: Mapping[str, str]) -> bool:
    if archive.optional and archive.file not in sources and not (root / archive.file).exists():
        return False
    if any((root / other).exists() for other in archive.replaced_by):
        return False
    return not archive.contents or bool(_missing(archive, root))


def _missing(archive: Archive, root: Path) -> dict[str, Path]:
    """Return the target paths of an archive's contents that do not exist yet."""
    return {inside: root / path for inside, path in archive.contents.items() if not (root / path).exists()}
