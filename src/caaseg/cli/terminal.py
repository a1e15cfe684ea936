"""Output of commands: consoles, progress bars and JSON files."""

import json as json_format
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from caaseg.training.step_log import Progress

COMMAND_LINE: list[str] = []
"""Arguments of the running command, recorded beside measurements."""


def console_for(json: str | None) -> "Console":
    """Return a console on standard output, or on standard error if standard output is for the JSON."""
    from rich.console import Console

    return Console(stderr=json == "-")


def write_json(content: dict[str, Any], target: str, console: "Console | None" = None) -> None:
    """Write JSON to a file atomically and print its name; "-" is standard output."""
    from caaseg.files import atomic_write

    text = json_format.dumps(content, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    with atomic_write(Path(target)) as temporary:
        temporary.write_text(text)
    if console is not None:
        console.print(f"numbers: {target}", soft_wrap=True, highlight=False)


@contextmanager
def progress_bars(console: "Console") -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a callback (name, done, total) that shows progress bars if the console is a terminal."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def report(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step)
            bar.update(tasks[step], completed=done, total=total)

        yield report


@contextmanager
def training_bars(console: "Console") -> Iterator[Callable[[str, "Progress"], None]]:
    """Yield a callback (name, progress) that shows a bar per training run if the console is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def show(name: str, progress: "Progress") -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name)
            score = "" if progress.mean_iou is None else f", mean IoU {100 * progress.mean_iou:.1f}"
            text = f"{name}: loss {progress.loss:.3f}, {progress.images_per_second:.0f} images/s{score}"
            bar.update(tasks[name], description=text, completed=progress.step, total=progress.steps)

        yield show
