"""Files that appear whole or not at all."""

import glob
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to; renamed to it when the block ends well, removed when it does not.

    Of several processes that write the same file at once each has a place of its own, and the last one's file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ending stays: writers choose a format by it. Two machines may have a process of the same number.
    aside = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.part{path.suffix}")
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())  # before it has its name: a name survives a power cut that content may not
        aside.replace(path)
    except OSError as error:
        if error.filename == str(aside):  # a name that nobody gave
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def remove_stale_temporaries(path: Path) -> None:
    """Remove what processes that were killed had begun to write for `path`; for who knows that nobody writes it now."""
    number = "[0-9a-f]" * 12  # and no other file's, whose name begins alike
    for aside in path.parent.glob(f".{glob.escape(path.stem)}.{number}.part{glob.escape(path.suffix)}"):
        aside.unlink(missing_ok=True)


@contextmanager
def lock_name(directory: Path, name: str, *, wait: bool) -> Iterator[bool]:
    """Hold a lock on a name among all processes that use a directory. Yields False if another one holds it.

    The operating system releases the lock of a killed process; its empty lock file is deleted with the next use.

    Args:
        directory: an existing directory, for the lock file.
        name: any text, such as the name of an image.
        wait: wait until the lock is free, instead of yielding False.
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    path = directory / f".{digest[:32]}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):  # Windows cannot delete a file that another process has open
            path.unlink(missing_ok=True)  # while locked: a waiting process notices, and creates the file again
        lock.release()
