"""Runs generated command lines in this process and checks that each ends as the documentation promises.

    python -m tests.hostile.runner AREA SEED     repeat one case, with its command line and output

A case ends with exit code 0, or with 2 and one message on standard error. It shows no traceback, writes nothing outside
its directory, and changes none of the files that were there before, except in `out`, which belongs to the command.
"""

import hashlib
import io
import os
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import matplotlib.font_manager  # noqa: F401  its first import creates directories of the user's
import numpy as np
from numpy.random import Generator

from caaseg.cli import main
from tests.time_limit import TookTooLongError, time_limit

AREAS = ("models", "checkpoints", "recipes", "images", "archives", "servers", "exports")
"""Modules of this package. Each has a function `case` that writes files and returns a command line."""
LIMIT_S = 60
CHANGES = {
    "os.rename": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
}
"""Audit events, with the number of their arguments that are paths to change."""
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Case = Callable[[Generator, Path], list[str]]


class Ended(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def failures(area: str, seeds: Sequence[int], parent: Path) -> list[str]:
    """Run the cases of some seeds, each in a directory of its own; return a description of each that failed."""
    found = []
    for seed in seeds:
        problems = run_case(area, seed, parent / f"{area}-{seed}")
        if problems:
            again = f"repeat with: python -m tests.hostile.runner {area} {seed}"
            found.append(f"{area} {seed}: {'; '.join(problems)}\n    {again}")
    return found


def run_case(area: str, seed: int, directory: Path, *, verbose: bool = False) -> list[str]:
    """Make a case and run it; return the problems found."""
    case: Case = import_module(f"tests.hostile.{area}").case
    directory.mkdir(parents=True)
    (directory / "tmp").mkdir()
    arguments = case(np.random.default_rng([zlib.crc32(area.encode()), seed]), directory)
    before = contents(directory)
    with inside(directory), changes_outside(directory) as outside:
        ended = call(arguments)
    if verbose:
        print(f"arguments: {arguments}\ncode: {ended.code}\nout: {ended.out}\nerr: {ended.err}")
    after = contents(directory)
    problems = problems_of(arguments, ended)
    problems += [f"changed outside: {path}" for path in outside]
    problems += [f"changed: {path}" for path, digest in before.items() if after.get(path) != digest]
    return problems


def problems_of(arguments: Sequence[str], ended: Ended) -> list[str]:
    """Return the problems with the exit code and the output of a command."""
    said = f"exit code {ended.code}, said {ended.err[-600:]!r} after {list(arguments)}"
    if "Traceback" in ended.out + ended.err:
        return [f"a traceback: {said}"]
    if ended.code not in (0, 2):
        return [f"another exit code: {said}"]
    if ended.code == 2:
        reports = list(arguments[:2]) == ["data", "check"] and ended.out.strip().endswith(("fault", "faults"))
        messages = [line for line in ended.err.splitlines() if line.startswith("caaseg: ")]
        if not reports and (len(messages) != 1 or not ended.err.startswith("caaseg: ") or ended.err.count("\n") != 1):
            return [f"not one message: {said}"]
    return []


def call(arguments: Sequence[str]) -> Ended:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(action="ignore"), time_limit(LIMIT_S):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except TookTooLongError:
            code = -1
            traceback.print_exc()
    return Ended(code, out.getvalue(), err.getvalue())


@contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Use a directory as working directory and for temporary files; downloads retry without pauses."""
    with (
        chdir(directory),
        patch.object(tempfile, "tempdir", str(directory / "tmp")),
        patch.object(time, "sleep", lambda _: None),
    ):
        yield


def contents(directory: Path) -> dict[str, str]:
    """Return digests of the files of a case, without those that belong to the command."""
    found = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if relative.parts[0] in ("out", "tmp"):
            continue
        if path.is_symlink():
            found[str(relative)] = f"link to {path.readlink()}"
        elif path.is_file():
            found[str(relative)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Watch:
    """Records changes to files outside a directory. An audit hook cannot be removed, only disabled."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.outside: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.directory is None:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS:
            paths = arguments[:1]
        elif event in CHANGES:
            paths = arguments[: CHANGES[event]]
        else:
            return
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                whole = (self.directory / os.fsdecode(path)).resolve()
                is_allowed = whole.is_relative_to(self.directory) or whole.is_relative_to("/dev")
                if not is_allowed and "__pycache__" not in whole.parts:
                    self.outside.append(str(whole))


WATCH: list[Watch] = []


@contextmanager
def changes_outside(directory: Path) -> Iterator[list[str]]:
    """Yield a list that gets the paths outside a directory that are written, created, renamed or deleted."""
    if not WATCH:
        WATCH.append(Watch())
    watch = WATCH[0]
    watch.directory, watch.outside = directory.resolve(), []
    try:
        yield watch.outside
    finally:
        watch.directory = None


def repeat(area: str, seed: int) -> int:
    with tempfile.TemporaryDirectory() as parent:
        problems = run_case(area, seed, Path(parent) / "case", verbose=True)
    print("\n".join(problems) or "fine")
    return len(problems)


if __name__ == "__main__":
    sys.exit(repeat(sys.argv[1], int(sys.argv[2])))
