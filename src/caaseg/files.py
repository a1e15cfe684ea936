"""Files that appear whole or not at all."""

import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
