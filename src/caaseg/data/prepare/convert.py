"""Convert labels from slow formats to PNG once, in parallel. The directory appears when it is complete."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.prepare import Progress
from caaseg.files import atomic_write, remove_stale_temporaries

PARALLEL_FROM = 100  # fewer files are converted faster than processes start


@dataclass(frozen=True, kw_only=True)
class ConversionJob:
    """Label files to convert."""

    target: Path
    """Directory to create."""
    sources: Mapping[str, Any]
    """For each PNG file name without suffix, the argument of `read`."""
    read: Callable[[Any], NDArray[np.uint8]]
    """Returns the content of a PNG, (H, W). Runs in worker processes."""
    lists: Mapping[Path, str] = field(default_factory=dict)
    """Text files to write before the directory appears."""


def convert(job: ConversionJob, progress: Progress) -> None:
    """Write all PNG files to a temporary directory, then rename it. Leftovers of an interrupted run are deleted.

    Only one process may convert to a directory at a time.
    """
    temporary = job.target.with_name(f".{job.target.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for done, _ in enumerate(_convert_all(job, temporary), start=1):
        progress(f"converting to {job.target.name}", done, len(job.sources))
    for path, text in job.lists.items():
        remove_stale_temporaries(path)
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")
    temporary.rename(job.target)


def _convert_all(job: ConversionJob, directory: Path) -> Iterator[None]:
    arguments = (repeat(job.read), job.sources.values(), [directory / f"{name}.png" for name in job.sources])
    processes = min(os.cpu_count() or 1, 32)
    if len(job.sources) < PARALLEL_FROM or processes == 1:
        yield from map(_convert_one, *arguments)
        return
    # Spawned, not forked: forking a process with torch's and the progress bar's threads may deadlock.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        yield from pool.map(_convert_one, *arguments, chunksize=8)
    finally:
        pool.shutdown(cancel_futures=True)


def _convert_one(read: Callable[[Any], NDArray[np.uint8]], source: Any, path: Path) -> None:
    encoded = BytesIO()
    Image.fromarray(read(source)).save(encoded, "PNG")
    path.write_bytes(encoded.getvalue())
