"""The log of a run: metrics.jsonl, one JSON object per line, and the same values for other loggers.

A training line holds the loss, the learning rate, images per second, and the share of the time spent waiting for data.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.training.loggers import LOGGERS, Entry, LoggedRun
from caaseg.training.run_directory import explain_write_error

FILE = "metrics.jsonl"


class MetricsLog:
    """Append to the metrics of a run. First delete lines after the step to resume from, which a killed process wrote.

    Args:
        run: the run directory.
        step: the step to resume from; 0 starts a new log.
        loggers: names of further loggers.
        settings: the settings of the run, for these loggers.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        loggers: Iterable[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        path = run / FILE
        history = read_metrics(path)
        lines = [line for line in history if line["step"] <= step]
        with explain_write_error(run, FILE), atomic_write(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self._run, self._file = run, path.open("a", encoding="utf-8")
        logged = LoggedRun(run, step, [_entry(**line) for line in history], settings or {})
        self._loggers = [LOGGERS[name](logged) for name in dict.fromkeys(loggers)]

    def write(self, step: int, values: dict[str, float | dict[str, float]]) -> None:
        """Write the values of a step; a value may be a dictionary of values."""
        line = {"step": step, **_without_nan(values)}
        with explain_write_error(self._run, FILE):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        for logger in self._loggers:
            logger.write(_entry(**line))

    def sync(self) -> None:
        """Flush all lines to disk. Call before writing a checkpoint: resuming does not repeat these steps."""
        os.fsync(self._file.fileno())
        for logger in self._loggers:
            logger.sync()

    def close(self) -> None:
        """Close the file and all loggers."""
        self._file.close()
        for logger in self._loggers:
            logger.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file.

    Damaged lines at its end, left by a killed process, are skipped. Other damaged lines raise CaasegError.
    """
    if not path.is_file():
        return []
    entries: list[dict[str, Any]] = []
    damaged = None
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        entry = _parse(line)
        if entry is None:
            damaged = number
        elif damaged is not None:
            raise CaasegError(
                f"{path}: line {damaged} is damaged; expected a JSON object with the key step; correct or delete it"
            )
        else:
            entries.append(entry)
    return entries


def _entry(step: int, **values: Any) -> Entry:
    """Return the numbers of a line by flat names, such as val_iou/sky."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}/{key}": score for key, score in value.items()} if isinstance(value, dict) else {name: value}
    return Entry(step, {name: value for name, value in flat.items() if value is not None})


def _parse(line: str) -> dict[str, Any] | None:
    """Return the values of a line, or None if it is damaged or not complete."""
    try:
        entry = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN by None, because JSON has no NaN. The IoU of a class in neither labels nor predictions is NaN."""
    return {
        name: _without_nan(value) if isinstance(value, dict) else value if math.isfinite(value) else None
        for name, value in values.items()
    }
