"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to; renamed to it when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.stem}.part{path.suffix}")  # the ending stays: writers choose a format by it
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(
                written.fileno()
            )  # on disk before it has its name: a name survives a power cut that content may not
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
