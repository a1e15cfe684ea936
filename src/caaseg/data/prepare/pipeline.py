"""Prepare a dataset: download, verify, unpack and convert what is missing.

Files and directories get their final name when they are complete. A name that exists is a step that is done, and an
interrupted run is simply repeated.
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


def prepare(name: str, root: Path, *, addresses: Mapping[str, str], progress: Progress) -> None:
    """Download, verify, unpack and convert a dataset.

    Args:
        name: name in the catalogue.
        root: directory of the dataset.
        addresses: download addresses by file name that replace those of the catalogue.
        progress: called in every step.
    """
    info = find(name)
    files = [Path(archive.file).name for archive in info.archives]
    for file in addresses:
        if file not in files:
            raise CaasegError(f"--addresses has {file!r}; expected any of {', '.join(files) or 'none'} for {name}")
    if info.has_files and is_ready(name, root):
        return
    if not info.archives:
        raise CaasegError(f"{name} has nothing to download; {info.how}")
    try:
        prepare_files(info, root, addresses=addresses, progress=progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"{root}: no space left for {error.filename or 'the next file'} ({error.strerror}); free some and run the "
            "same command again to resume"
        ) from error
    try:
        _open_splits(name, root)
    except CaasegError as error:  # a directory of an archive existed before, and its content is not that of the archive
        raise BadFileError(
            f"{root}: {name} is not complete ({error}); move the directory of that file elsewhere, and run the same "
            "command again to unpack the archive"
        ) from error


def is_ready(name: str, root: Path) -> bool:
    """Return whether every split opens and has all its files."""
    try:
        return _open_splits(name, root) > 0
    except (CaasegError, OSError):
        return False


def _open_splits(name: str, root: Path) -> int:
    """Open every split, which checks that its files exist; return the number of splits."""
    return len([open_dataset(name, root, split) for split in find(name).counts])


def prepare_files(info: DatasetInfo, root: Path, *, addresses: Mapping[str, str], progress: Progress) -> None:
    """Download, verify, unpack and convert the files of a dataset that are missing.

    Args:
        info: catalogue entry of the dataset.
        root: directory of the dataset.
        addresses: download addresses by file name that replace those of the entry.
        progress: called in every step.
    """
    needed = [archive for archive in info.archives if _is_needed(archive, root)]
    by_hand = [
        root / archive.file
        for archive in needed
        if archive.address is None and Path(archive.file).name not in addresses and not (root / archive.file).exists()
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
            if file.exists():
                check_sha1(file, archive.sha1, progress)
            else:
                address = addresses.get(file.name, archive.address)
                assert address is not None  # archives to download by hand exist
                max_bytes = archive.max_gigabytes * 10**9
                download(address, file, sha1=archive.sha1, progress=progress, max_bytes=max_bytes)
            if missing := _missing(archive, root):
                unpack(file, missing, progress)
        if info.conversion and (job := info.conversion(root)):
            convert(job, progress)


def _is_needed(archive: Archive, root: Path) -> bool:
    if archive.optional and not (root / archive.file).exists():
        return False
    if any((root / other).exists() for other in archive.replaced_by):
        return False
    return not archive.contents or bool(_missing(archive, root))


def _missing(archive: Archive, root: Path) -> dict[str, Path]:
    """Return the target paths of an archive's contents that do not exist yet."""
    return {inside: root / path for inside, path in archive.contents.items() if not (root / path).exists()}
