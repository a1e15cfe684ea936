"""The log of a run: metrics.jsonl, one JSON object per line, and the same values for TensorBoard.

A training line holds the loss, the learning rate, images per second, and the share of the time spent waiting for data.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from caaseg.files import atomic_write

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to a run's metrics. Lines after the step to resume from were written by a killed process: they are cut.

    Args:
        run: the run directory.
        step: the step to resume from; 0 starts a new log.
    """

    def __init__(self, run: Path, step: int) -> None:
        path = run / FILE
        lines = [line for line in read_metrics(path) if line["step"] <= step]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._file = path.open("a")
        self._events: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float | dict[str, float]]) -> None:
        """Write the values of a step; a value may be a dictionary of values."""
        self._file.write(json.dumps({"step": step, **_without_nan(values)}) + "\n")
        self._file.flush()
        for name, value in values.items():
            for tag, number in value.items() if isinstance(value, dict) else [("", value)]:
                self._events.add_scalar(f"{name}/{tag}".rstrip("/"), number, step)

    def sync(self) -> None:
        """Flush all lines to disk. Call before writing a checkpoint: resuming does not repeat these steps."""
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; a line cut off by a kill is skipped."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN by null, because JSON has no NaN. A class in neither labels nor predictions has no IoU."""
    return {
        name: _without_nan(value) if isinstance(value, dict) else value if math.isfinite(value) else None
        for name, value in values.items()
    }
