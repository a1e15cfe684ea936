"""What a run measured: metrics.jsonl, one JSON object a line, and the same numbers for TensorBoard.

A line of training has the loss, the learning rate, images a second and the share of the time that was spent waiting for
batches: well above 0, more workers help.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from caaseg.files import atomic_write

FILE = "metrics.jsonl"


class Journal:
    """Appends to a run's metrics. What lies beyond the step it starts at was measured by a run that was killed."""

    def __init__(self, run: Path, step: int) -> None:
        """Open the journal to go on after a step; 0 begins it."""
        path = run / FILE
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        with atomic_write(path) as aside:
            aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")
        self._events: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float | dict[str, float]]) -> None:
        """Note numbers of a step; a name may stand for several, by name."""
        self._file.write(json.dumps({"step": step, **_finite(values)}) + "\n")
        self._file.flush()
        for name, value in values.items():
            for tag, number in value.items() if isinstance(value, dict) else [("", value)]:
                self._events.add_scalar(f"{name}/{tag}".rstrip("/"), number, step)

    def sync(self) -> None:
        """Have all lines on disk, before a checkpoint says that they are not to be written again."""
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; one that a kill cut off is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is in neither labels nor predictions has no IoU and is null."""
    return {
        name: _finite(value) if isinstance(value, dict) else value if math.isfinite(value) else None
        for name, value in values.items()
    }
