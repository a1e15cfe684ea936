"""Commands that fail, for the tests of `main`."""

import errno
import signal
from pathlib import Path
from threading import Thread

from caaseg.cli.terminal import console_for
from caaseg.errors import CaasegError
from caaseg.files import atomic_write


def interrupted() -> int:
    """Be interrupted by Ctrl-C."""
    raise KeyboardInterrupt


def not_permitted() -> int:
    """Find a file that must not be written."""
    raise PermissionError(13, "Permission denied", "locked/table.md")


def bad_name() -> int:
    """Find no file of a name with control characters."""
    raise CaasegError("a\nb\x1b[2J.png: no such file")


def broken() -> int:
    """Have a bug."""
    raise KeyError("a bug")


def out_of_memory() -> int:
    """Need more memory than there is."""
    raise MemoryError("Cannot allocate memory")


def without_worker() -> int:
    """Lose a data loading process."""
    raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed.")


def with_a_closed_pipe() -> int:
    """Print more than the reader of standard output wants to read."""
    console_for(None).print("line")
    return 0


def with_a_failing_thread() -> int:
    """Have a thread that cannot write."""

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    thread = Thread(target=write)
    thread.start()
    thread.join()
    return 0


def with_a_signal() -> int:
    """Get SIGTERM while a temporary file exists."""
    with atomic_write(Path("table.json")) as temporary:
        temporary.write_text("half")
        signal.raise_signal(signal.SIGTERM)
    return 0
