"""Atomic file writes: a file appears complete or not at all."""

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
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds, delete it otherwise.

    Concurrent writers of the same file use different temporary paths; the last rename wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keep the suffix, because writers choose the format by it. A process id is not unique across machines.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.part{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # before the rename: after a power cut the name may exist without the content
        temporary.replace(path)
    except OSError as error:
        if error.filename == str(temporary):  # report the path that the caller knows
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale_temporaries(path: Path) -> None:
    """Delete temporary files of killed writers of `path`. Call only while holding the lock on `path`."""
    unique = "[0-9a-f]" * 12  # does not match temporary files of other paths with the same prefix
    for temporary in path.parent.glob(f".{glob.escape(path.stem)}.{unique}.part{glob.escape(path.suffix)}"):
        temporary.unlink(missing_ok=True)


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
