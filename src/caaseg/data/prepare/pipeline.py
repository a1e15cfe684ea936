"""From nothing to a dataset that opens: fetch, verify, unpack, convert. What is there already is used.

Everything is made aside and gets its name when whole, so a name that exists is a step that is done, and a run that was
interrupted, by whatever, is simply repeated.
"""

import errno
from collections.abc import Mapping
from pathlib import Path

from caaseg.data.catalogue import Archive, Entry, find, open_dataset
from caaseg.data.prepare.convert import Report, convert
from caaseg.data.prepare.download import check_sha1, download
from caaseg.data.prepare.unpack import unpack


def prepare(name: str, root: Path, *, addresses: Mapping[str, str], report: Report) -> None:
    """Bring a dataset into the state in which it opens.

    Args:
        name: a name of the catalogue.
        root: the folder for it.
        addresses: for the names of files, addresses to fetch them from instead of the catalogue's.
        report: told of every step.
    """
    entry = find(name)
    files = [Path(archive.file).name for archive in entry.archives]
    for file in addresses:
        if file not in files:
            raise ValueError(f"--addresses has {file!r}; expected any of {', '.join(files) or 'none'} for {name}")
    if entry.has_files and is_ready(name, root):
        return
    if not entry.archives:
        raise ValueError(f"{name} has nothing to fetch; {entry.how}")
    try:
        _make(entry, root, addresses, report)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"{root}: no space left for {error.filename or 'the next file'} ({error.strerror}); free some and run the "
            "same command again: it goes on where it stopped"
        ) from error


def is_ready(name: str, root: Path) -> bool:
    """Whether every split opens and has all its files."""
    try:
        return bool([open_dataset(name, root, split) for split in find(name).counts])
    except (ValueError, OSError):
        return False


def _make(entry: Entry, root: Path, addresses: Mapping[str, str], report: Report) -> None:
    needed = [archive for archive in entry.archives if _is_needed(archive, root)]
    by_hand = [
        root / archive.file
        for archive in needed
        if archive.address is None and Path(archive.file).name not in addresses and not (root / archive.file).exists()
    ]
    if by_hand:
        raise ValueError(
            f"{entry.title} is given out behind a login: fetch {' and '.join(path.name for path in by_hand)} at "
            f"{needed[0].page}, put them at {' and '.join(map(str, by_hand))}, and run the same command again"
        )
    root.mkdir(parents=True, exist_ok=True)
    for archive in needed:
        _provide(archive, root, addresses, report)
    conversion = entry.conversion(root) if entry.conversion else None
    if conversion is not None:
        convert(conversion, report)


def _is_needed(archive: Archive, root: Path) -> bool:
    if archive.optional and not (root / archive.file).exists():
        return False
    if any((root / other).exists() for other in archive.instead):
        return False
    return not archive.holds or bool(_missing(archive, root))


def _missing(archive: Archive, root: Path) -> dict[str, Path]:
    """What it holds and is not in its place yet."""
    return {inside: root / place for inside, place in archive.holds.items() if not (root / place).exists()}


def _provide(archive: Archive, root: Path, addresses: Mapping[str, str], report: Report) -> None:
    file = root / archive.file
    if file.exists():
        check_sha1(file, archive.sha1, report)
    else:
        address = addresses.get(file.name, archive.address)
        assert address is not None  # those to be fetched by hand are there
        download(address, file, sha1=archive.sha1, report=report)
    if missing := _missing(archive, root):
        unpack(file, missing, report)
