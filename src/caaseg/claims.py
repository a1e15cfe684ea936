"""Work that several processes share without speaking to each other: a piece is done by one of them at a time."""

import errno
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl


class Claims:
    """Claims on names, by locks on single bytes of one empty file.

    The system lets go of a lock when its process ends, however it ends: nothing is left over to clear up. Where there
    are no such locks (Windows, some network folders) every claim is granted; then do not start two at once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")

    def __enter__(self) -> "Claims":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @contextmanager
    def claimed(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Whether the name is ours while the block runs. Waiting, it always is in the end."""
        if sys.platform == "win32":
            yield True
            return
        byte = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:7])
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except OSError as error:
            yield error.errno not in (errno.EACCES, errno.EAGAIN)  # any other: there are no locks here
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)
