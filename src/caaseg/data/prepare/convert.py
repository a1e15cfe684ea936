"""Labels in slow formats, made into PNG once, by all cores. The folder appears when every file in it is made."""

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

from caaseg.files import atomic_write

Report = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and of how much, where known."""

FEW = 100  # fewer files than this are done before other processes have started


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is to be made."""

    target: Path
    """The folder that appears."""
    sources: Mapping[str, Any]
    """The name of each PNG without its ending, and what `read` makes it of."""
    read: Callable[[Any], NDArray[np.uint8]]
    """What the PNG shall hold, (H, W). It runs in other processes."""
    lists: Mapping[Path, str] = field(default_factory=dict)
    """Text files written along, before the folder appears."""


def convert(conversion: Conversion, report: Report) -> None:
    """Make all PNG files aside, then give their folder its name. Whatever an interrupted run left is made again."""
    target = conversion.target
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    total = len(conversion.sources)
    for done, _ in enumerate(_made(conversion, aside), start=1):
        report(f"converting to {target.name}", done, total)
    for path, text in conversion.lists.items():
        with atomic_write(path) as beside:
            beside.write_text(text, encoding="utf-8")
    aside.rename(target)


def _made(conversion: Conversion, folder: Path) -> Iterator[None]:
    paths = [folder / f"{name}.png" for name in conversion.sources]
    work = (repeat(conversion.read), conversion.sources.values(), paths)
    processes = min(os.cpu_count() or 1, 32)
    if len(paths) < FEW or processes == 1:
        yield from map(_write, *work)
        return
    # Fresh processes: a copy of one that runs torch's and the progress bar's threads may wait for ever.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        yield from pool.map(_write, *work, chunksize=8)
    finally:
        pool.shutdown(cancel_futures=True)


def _write(read: Callable[[Any], NDArray[np.uint8]], source: Any, path: Path) -> None:
    encoded = BytesIO()
    Image.fromarray(read(source)).save(encoded, "PNG")
    path.write_bytes(encoded.getvalue())
