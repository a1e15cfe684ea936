"""Exit codes and error messages of commands, and signals that end them."""

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from types import FrameType

from caaseg.cli.terminal import printable
from caaseg.errors import CaasegError


def exit_code(command: Callable[[], int], arguments: Sequence[str]) -> int:
    """Run a command and return its exit code: 2 for bad input, 1 for a bug. An exception becomes one message.

    Args:
        command: returns its exit code.
        arguments: the command line; with --debug, an exception also shows its traceback.
    """
    try:
        with ending_signals(), thread_errors():
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):  # escape characters that the terminal's encoding does not have
                    stream.reconfigure(errors="backslashreplace")
            code = command()
            if sys.stdout is not None:  # None if the shell closed it
                sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        resumable = "; run the same command to continue" if arguments[0] in ("demo", "predict") else ""
        print(f"caaseg: interrupted{resumable}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes standard output again at exit; this sends the rest to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # like a command that SIGPIPE ended
    except Exception as error:
        is_bug, lost_worker = not isinstance(error, CaasegError | OSError | MemoryError), False
        if isinstance(error, RuntimeError):
            lost_worker = resolve_name("caaseg.data.loader:is_lost_worker")(error)
            is_bug = not lost_worker and not resolve_name("caaseg.models.inference:is_out_of_memory")(error)
        if is_bug or "--debug" in arguments:
            traceback.print_exc()
        message = "this is a bug; please report it with the traceback above" if is_bug else str(error)
        if lost_worker:
            message = f"{error}; if the memory was full, use fewer workers; training continues with --resume auto"
        if isinstance(error, PermissionError) and error.filename is not None:
            message = f"{error.filename}: permission denied; choose another path, or change its permissions"
        print(f"caaseg: {printable(message)}", file=sys.stderr)
        return 1 if is_bug else 2


@contextmanager
def ending_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM and SIGHUP, so that temporary files are deleted. Ignored signals stay ignored."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP")]  # Windows has no SIGHUP
    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    changed = [number for number in numbers if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def thread_errors() -> Iterator[None]:
    """Print no traceback if a thread fails to write: TensorBoard raises the error again in the main thread."""
    before = threading.excepthook
    threading.excepthook = lambda thread: None if isinstance(thread.exc_value, OSError) else before(thread)
    try:
        yield
    finally:
        threading.excepthook = before
