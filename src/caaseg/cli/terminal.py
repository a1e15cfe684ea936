"""Output of commands: consoles, progress bars, log lines and JSON files."""

import json as json_format
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from caaseg.training.step_log import Progress

COMMAND_LINE: list[str] = []
"""Arguments of the running command, stored with measurements."""
SECONDS_PER_LINE = 5
"""Minimum time between two log lines of a training run."""
SECONDS_PER_PROGRESS_LINE = 30
"""Minimum time before and between log lines of other work."""


def console_for(json: str | None) -> "Console":
    """Return a console on standard output, or on standard error if standard output is for the JSON.

    It prints text as it is: brackets in names are not markup, and control characters are escaped.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                lines = [segment.text] if segment.control else map(printable, segment.text.split("\n"))
                yield Segment("\n".join(lines), segment.style, segment.control)

        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError, instead of an exit without a message

    return PlainConsole(stderr=json == "-", markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """Return text with control characters and undecodable bytes escaped as in repr. File names may contain them."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(escaped)


def write_json(content: dict[str, Any], target: str, console: "Console | None" = None) -> None:
    """Write JSON to a file atomically and print its name; "-" is standard output."""
    from caaseg.files import atomic_write

    text = json_format.dumps(content, indent=1) + "\n"
    if target == "-":
        print(text, end="")  # nothing if standard output is closed
        return
    with atomic_write(Path(target)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    if console is not None:
        console.print(f"numbers: {target}", soft_wrap=True, highlight=False)


@contextmanager
def progress_bars(
    console: "Console", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a callback (name, done, total) that shows progress bars, or a few log lines if there is no terminal."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    started: dict[str, tuple[float, int]] = {}  # time and number of the first report
    last_line: dict[str, float] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def report(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step)
                started[step] = clock(), done
                last_line[step] = started[step][0]
            now, (start, before) = clock(), started[step]
            if not console.is_terminal and now - last_line[step] >= SECONDS_PER_PROGRESS_LINE:
                last_line[step] = now
                speed = f"{(done - before) / (now - start):.1f} per second"
                console.print(f"{step}: {done}{'' if total is None else f' of {total}'}, {speed}", soft_wrap=True)
            bar.update(tasks[step], completed=done, total=total)

        yield report


@contextmanager
def training_progress(
    console: "Console", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, "Progress"], None]]:
    """Yield a callback (name, progress) that shows a bar per training run, or log lines if there is no terminal.

    Each validation prints a line in both cases.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    last_line: dict[str, float] = {}  # time of the last log line of each run
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def show(name: str, progress: "Progress") -> None:
            score = "" if progress.mean_iou is None else f", mean IoU {100 * progress.mean_iou:.1f}"
            state = f"loss {progress.loss:.3f}, {progress.images_per_second:.1f} images/s"
            at = f"{name}: step {progress.step} of {progress.steps}"
            if progress.is_validation:
                console.print(f"{at}: validation{score}", soft_wrap=True)
            elif not console.is_terminal and clock() - last_line.get(name, -math.inf) >= SECONDS_PER_LINE:
                last_line[name] = clock()
                left = timedelta(seconds=round(progress.seconds_left))
                console.print(f"{at}, {state}, {left} left", soft_wrap=True)
            if name not in tasks:
                tasks[name] = bar.add_task(name)
            bar.update(
                tasks[name], description=f"{name}: {state}{score}", completed=progress.step, total=progress.steps
            )

        yield show
