"""Kills trainings, predictions and preparations at random moments, repeats them, and compares the results bit for bit.

    python -m tests.hostile.kills [--train 60] [--predict 40] [--prepare 10] [--seed 0] > tests/hostile/kills.txt

A command is started and killed the requested number of times, then it runs to its end. If it finishes before it is
killed, it is started again in a new directory. Every finished result must equal that of an undisturbed run. This
process imports everything once and forks each command, so that a kill can hit its first moments, too. Two processes of
a training are started as torchrun does; SIGKILL is sent to one of them, other signals to both.
"""

import argparse
import hashlib
import io
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

import caaseg.api
import caaseg.predictions  # noqa: F401  imported once, before all forks
from caaseg.cli import main
from caaseg.data.prepare import pipeline  # noqa: F401
from caaseg.training import setup
from caaseg.training.metrics_log import read_metrics
from tests.data import trees
from tests.data.prepare.server import serving
from tests.processes import shorten_rank_timeout
from tests.small_models import random_images, small_model
from tests.training.small import SMALL_ARGUMENTS

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TRAINING = (
    *(
        "train",
        "scenes/caa_resnet18",
        "--device",
        "cpu",
        "--resume",
        "auto",
        *SMALL_ARGUMENTS,
        "--optimizer.ema",
        "0.9",
    ),
    *("--batch_size", "4", "--steps", "40", "--checkpoint_every", "4", "--validate_every", "20"),
)
TIMINGS = ("images_per_second", "waiting")
RANK_TIMEOUT_S = 10
MAX_WAIT_S = 120
LATEST_KILL = 0.6
"""Latest moment of a kill, as a share of an undisturbed run. Repeated runs continue, so kills hit the rest as well."""

Result = dict[str, str]  # digests by path


@dataclass(frozen=True)
class Command:
    """A command that writes into a directory."""

    arguments: Callable[[Path], Sequence[str]]
    result: Callable[[Path], Result]
    processes: int = 1


@dataclass
class Row:
    """Kills with one signal and one set of options."""

    name: str
    signal: signal.Signals
    workers: int | None
    processes: int
    kills: int = 0
    finished: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        workers = "-" if self.workers is None else self.workers
        verdict = "; ".join(self.problems) or "bit-identical"
        return (
            f"{self.name:8} {self.signal.name:8} {workers:>7} {self.processes:>9} {self.kills:>5} {self.finished:>8}  "
            f"{verdict}"
        )


HEADING = f"{'command':8} {'signal':8} {'workers':>7} {'processes':>9} {'kills':>5} {'finished':>8}  result"


def start(command: Command, directory: Path) -> list[int]:
    """Fork the processes of a command; return their ids."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return [fork(command, directory, rank, port) for rank in range(command.processes)]


def fork(command: Command, directory: Path, rank: int, port: str) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if command.processes > 1:
            own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
            group = {"WORLD_SIZE": command.processes, "LOCAL_WORLD_SIZE": command.processes, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in (own | group).items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="kills")
        shorten_rank_timeout(RANK_TIMEOUT_S)
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = main(command.arguments(directory))
        if code == 1:
            print(said.getvalue(), flush=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:  # before or after the command
        code = 128 + signal.SIGINT
    finally:
        os._exit(code)


def finish(command: Command, directory: Path) -> float:
    """Run a command to its end; return its duration in seconds."""
    began = time.monotonic()
    children = start(command, directory)
    codes = [wait(child) for child in children]
    if any(codes):
        raise RuntimeError(f"exit codes {codes} of an undisturbed {command.arguments(directory)[0]} in {directory}")
    return time.monotonic() - began


def wait(child: int) -> int:
    """Return the exit code of a process. A process that hangs is aborted, which gives an unexpected exit code."""
    latest = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < latest:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGABRT)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(row: Row, command: Command, directory: Path, rng: random.Random, duration_s: float) -> bool:
    """Start a command and kill it at a random moment; return whether it finished before."""
    children = start(command, directory)
    time.sleep(rng.uniform(0, LATEST_KILL * duration_s))
    hit = [rng.choice(children)] if row.signal == signal.SIGKILL else children
    for child in hit:
        with suppress(ProcessLookupError):
            os.kill(child, row.signal)
    codes = {child: wait(child) for child in children}
    if not any(codes.values()):
        return True
    row.kills += 1
    expected = {-row.signal, 128 + row.signal}
    if row.signal == signal.SIGKILL:
        others = {0, 2} if any(codes[child] != 0 for child in hit) else set[int]()
        is_fine = all(code in (expected if child in hit else others) for child, code in codes.items())
    else:
        # A process may see the end of the other one before its own signal.
        lost = {2} if len(codes) > 1 and expected & set(codes.values()) else set[int]()
        is_fine = all(code in expected | {0} | lost for code in codes.values())
    if not is_fine:
        row.problems.append(f"exit codes {list(codes.values())}")
    return False


def run_row(
    row: Row, command: Command, kills: int, expected: Result, duration_s: float, directory: Path, seed: str
) -> None:
    """Kill a command as often as a row requests; compare every finished result."""
    rng, number = random.Random(seed), 0
    while row.kills < kills:
        number += 1
        target = directory / str(number)
        finished = False
        while row.kills < kills and not finished:
            finished = kill(row, command, target, rng, duration_s)
        if not finished:
            finish(command, target)
        row.finished += 1
        found = command.result(target)
        differences = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        if differences:
            row.problems.append(f"{len(differences)} files differ, such as {min(differences)}")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files(directory: Path) -> Result:
    """Return digests of all files; hidden ones are locks and leftovers of killed writers."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(directory)): digest(path.read_bytes()) for path in sorted(paths)}


def training_result(run: Path) -> Result:
    """Return digests of the models, and of the metrics without their timings."""
    lines = [
        {name: value for name, value in line.items() if name not in TIMINGS}
        for line in read_metrics(run / "metrics.jsonl")
    ]
    models = {
        f"{kind}/model.safetensors": (run / kind / "model.safetensors").read_bytes() for kind in ("model", "best")
    }
    return {name: digest(content) for name, content in models.items()} | {"metrics": digest(repr(lines).encode())}


def share(total: int, parts: int, k: int) -> int:
    """Return the size of part k of a total, all as equal as possible."""
    return total * (k + 1) // parts - total * k // parts


def kill_trainings(total: int, parent: Path, seed: int) -> list[Row]:
    rows = []
    settings = list(product((1, 2), (0, 2), SIGNALS))
    for processes in (1, 2):
        commands = {
            workers: Command(
                lambda run, w=workers: [*TRAINING, "--data.workers", str(w), "--out", str(run)],  # type: ignore[misc]
                training_result,
                processes,
            )
            for workers in (0, 2)
        }
        reference = parent / f"train-{processes}"
        duration_s = finish(commands[0], reference)
        expected = training_result(reference)
        for k, (count, workers, number) in enumerate(settings):
            if count == processes and share(total, len(settings), k):
                row = Row("train", number, workers, processes)
                directory = parent / f"train-{processes}-{workers}-{number.name}"
                kills = share(total, len(settings), k)
                run_row(row, commands[workers], kills, expected, duration_s, directory, f"{seed} {directory.name}")
                print(row, flush=True)
                rows.append(row)
    return rows


def kill_others(name: str, command: Command, total: int, parent: Path, seed: int) -> list[Row]:
    rows = []
    duration_s = finish(command, parent / name)
    expected = command.result(parent / name)
    for k, number in enumerate(SIGNALS):
        if share(total, len(SIGNALS), k):
            row = Row(name, number, None, 1)
            directory = parent / f"{name}-{number.name}"
            run_row(
                row, command, share(total, len(SIGNALS), k), expected, duration_s, directory, f"{seed} {directory.name}"
            )
            print(row, flush=True)
            rows.append(row)
    return rows


def kill_predictions(total: int, parent: Path, seed: int) -> list[Row]:
    from PIL import Image

    photos = parent / "photos"
    photos.mkdir()
    for k in range(24):
        pixels = random_images(96 + k, 128, seed=k).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(photos / f"{k}.png")
    small_model().save_pretrained(parent / "model")
    options = ("--probabilities", "--device", "cpu")
    command = Command(lambda out: ["predict", str(parent / "model"), str(photos), "--out", str(out), *options], files)
    return kill_others("predict", command, total, parent, seed)


def kill_preparations(total: int, parent: Path, seed: int) -> list[Row]:
    import zipfile

    trees.coco_stuff_10k(parent / "tree", train=30, test=30)
    name = "cocostuff-10k-v1.1.zip"
    with zipfile.ZipFile(parent / name, "w") as archive:
        for path in sorted((parent / "tree").rglob("*")):
            archive.write(path, path.relative_to(parent / "tree"))
    with serving() as server:
        server.files[name] = (parent / name).read_bytes()
        addresses = f"{name}={server.url(name)}"
        command = Command(
            lambda root: ["data", "prepare", "coco_stuff_10k", "--root", str(root), "--addresses", addresses],
            files,
        )
        return kill_others("prepare", command, total, parent, seed)


def run_all(train: int, predict: int, prepare: int, seed: int) -> int:
    """Run all commands and kills, print a table, and return the number of rows with a problem."""
    torch.set_num_threads(1)
    setup.make_fabric(setup.Processes(torch.device("cpu"), 1, 1), "32")  # imports lightning_fabric
    began = time.monotonic()
    print(HEADING, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        rows = kill_trainings(train, Path(directory), seed) if train else []
        rows += kill_predictions(predict, Path(directory), seed) if predict else []
        rows += kill_preparations(prepare, Path(directory), seed) if prepare else []
    bad = sum(bool(row.problems) for row in rows)
    kills = sum(row.kills for row in rows)
    verdict = "all results bit-identical" if not bad else f"{bad} of {len(rows)} rows with a problem"
    print(f"{kills} kills, seed {seed}, {(time.monotonic() - began) / 60:.1f} minutes: {verdict}")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option, default in (("train", 60), ("predict", 40), ("prepare", 10), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    sys.exit(run_all(**vars(parser.parse_args())))
