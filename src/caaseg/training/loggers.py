"""Loggers of training metrics in addition to metrics.jsonl: TensorBoard, CSV, Weights & Biases and MLflow.

Weights & Biases and MLflow cannot delete entries. After a resume they skip the entries that the run sent before it was
killed; the values are the same, because a resumed run repeats them exactly.
"""

import csv
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.training.run_directory import explain_write_error

CSV_FILE = "metrics.csv"
PACKAGES = ("wandb", "mlflow")
"""Loggers that need a package, and an extra of caaseg, of the same name."""


class Entry(NamedTuple):
    """Values of a step. A step may have two entries: training and validation."""

    step: int
    values: Mapping[str, float]


class LoggedRun(NamedTuple):
    """The run that a logger belongs to."""

    directory: Path
    start: int  # the step to resume from; 0 for a new run
    history: Sequence[Entry]  # all entries before the resume, including entries after `start`
    settings: Mapping[str, Any]  # values of the recipe


class MetricsLogger(Protocol):
    """Receives the metrics of a run."""

    def write(self, entry: Entry) -> None:
        """Add an entry."""

    def sync(self) -> None:
        """Flush all entries to disk."""

    def close(self) -> None:
        """Flush all entries and end the log."""


class TensorBoardLogger:
    """TensorBoard events in tensorboard/."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.start + 1)

    def write(self, entry: Entry) -> None:
        for name, value in entry.values.items():
            self._events.add_scalar(name, value, entry.step)

    def sync(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class CSVLogger:
    """A table in metrics.csv: one row per step, one column per metric. Written with each checkpoint."""

    def __init__(self, run: LoggedRun) -> None:
        self._directory = run.directory
        self._rows: dict[int, dict[str, float]] = {}
        for entry in run.history:
            if entry.step <= run.start:
                self.write(entry)

    def write(self, entry: Entry) -> None:
        self._rows.setdefault(entry.step, {"step": entry.step}).update(entry.values)

    def sync(self) -> None:
        columns = list(dict.fromkeys(name for row in self._rows.values() for name in row))
        with (
            explain_write_error(self._directory, CSV_FILE),
            atomic_write(self._directory / CSV_FILE) as temporary,
            temporary.open("w", newline="") as file,
        ):
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(self._rows.values())

    def close(self) -> None:
        self.sync()


class WandbLogger:
    """A run of Weights & Biases in the project caaseg."""

    def __init__(self, run: LoggedRun) -> None:
        wandb: Any = import_module("wandb")
        identity = _stored_id(run.directory / "wandb_id")
        self._sent = set() if identity is None else sent_entries(run.history)
        identity = identity or _store_id(run.directory / "wandb_id", uuid.uuid4().hex)
        self._run = wandb.init(
            project="caaseg",
            name=run.directory.name,
            dir=str(run.directory),
            id=identity,
            resume="allow",
            config=dict(run.settings),
        )

    def write(self, entry: Entry) -> None:
        if _key(entry) not in self._sent:
            self._run.log(dict(entry.values), step=entry.step)

    def sync(self) -> None:
        """Do nothing: the package sends entries by itself."""

    def close(self) -> None:
        self._run.finish()


class MLflowLogger:
    """A run of MLflow, at the tracking URI that MLflow is configured with."""

    def __init__(self, run: LoggedRun) -> None:
        self._mlflow: Any = import_module("mlflow")
        identity = _stored_id(run.directory / "mlflow_id")
        self._sent = set() if identity is None else sent_entries(run.history)
        started = self._mlflow.start_run(run_id=identity, run_name=run.directory.name)
        if identity is None:
            _store_id(run.directory / "mlflow_id", started.info.run_id)
            self._mlflow.log_dict(dict(run.settings), "recipe.yaml")

    def write(self, entry: Entry) -> None:
        if _key(entry) not in self._sent:
            allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in entry.values.items()}
            self._mlflow.log_metrics(allowed, step=entry.step)

    def sync(self) -> None:
        """Do nothing: the package sends entries by itself."""

    def close(self) -> None:
        self._mlflow.end_run()


LOGGERS: dict[str, Callable[[LoggedRun], MetricsLogger]] = {
    "tensorboard": TensorBoardLogger,
    "csv": CSVLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
}


def check_loggers(names: Iterable[str]) -> None:
    """Raise CaasegError if the package of a logger is not installed."""
    for package in (name for name in names if name in PACKAGES):
        try:
            import_module(package)
        except ImportError as error:
            raise CaasegError(
                f"loggers contains {package}, but this package cannot be imported ({error}); install it with "
                f"pip install 'caaseg[{package}]', or leave it out"
            ) from error


def sent_entries(history: Iterable[Entry]) -> set[tuple[int, tuple[str, ...]]]:
    """Return step and metric names of each entry, which identify it."""
    return {_key(entry) for entry in history}


def _key(entry: Entry) -> tuple[int, tuple[str, ...]]:
    return entry.step, tuple(entry.values)


def _stored_id(path: Path) -> str | None:
    return path.read_text().strip() if path.is_file() else None


def _store_id(path: Path, identity: str) -> str:
    with explain_write_error(path.parent, path.name), atomic_write(path) as temporary:
        temporary.write_text(f"{identity}\n")
    return identity
