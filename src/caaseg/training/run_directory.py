"""The run directory: its lock, and messages for files that cannot be written."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from caaseg.errors import CaasegError
from caaseg.files import lock_name


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the lock of a run directory. Raises CaasegError if another process trains in it.

    The operating system releases the lock of a killed process.
    """
    is_new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    try:
        with lock_name(run, "training", wait=False) as is_locked:
            if not is_locked:
                raise CaasegError(
                    f"{run}: another process is training in this directory; wait until it ends, or choose another --out"
                )
            yield
    finally:
        if is_new:
            with suppress(OSError):  # not empty: the run has started
                run.rmdir()


@contextmanager
def explain_write_error(run: Path, name: str) -> Iterator[None]:
    """Turn an error while writing a file or directory of a run into a CaasegError with the free disk space."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # the file writer of torch.save
            raise
        reason = f"{error.strerror}, " if isinstance(error, OSError) and error.strerror else ""
        if not run.is_dir():
            raise CaasegError(f"{run}: the run directory was moved or deleted during the training") from error
        free = shutil.disk_usage(run).free
        raise CaasegError(
            f"{run / name}: cannot be written ({reason}{free / 1e9:,.2f} GB of disk space are free); free some space, "
            "then continue with --resume auto"
        ) from error
