"""Benchmark of the command `caaseg train`: time to the first step, images per second, waiting and GPU utilization.

The command runs in a process of its own, with its loader, logs and start. Its own log lines give the speed.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE
from caaseg.errors import CaasegError
from caaseg.training.metrics_log import FILE as METRICS
from caaseg.training.metrics_log import read_metrics
from caaseg.training.step_log import LOG_EVERY

WARMUP_LINES = 2  # log lines of LOG_EVERY steps each that are not measured
STOP_S = 120  # time to write a checkpoint and end
NEVER = "1000000000"  # steps between validations and checkpoints, so that none is measured
SAMPLE_MS = 200  # time between two samples of the GPU utilization


class TrainingSpeed(NamedTuple):
    """Speed of a training command."""

    steps: int  # measured steps
    images_per_second: float
    waiting: float  # share of the time that the training loop waits for data
    first_step_s: float  # from the start of the command to the end of its first step; an upper bound
    gpu_utilization: float | None  # share of the time in which a kernel ran, by NVML; None without a GPU


def measure_training(
    arguments: Sequence[str], batch_size: int, *, seconds: float, gpu: str | None = None, start_s: float = 300
) -> TrainingSpeed:
    """Run `caaseg train` and stop it after the measurement.

    The first step is not logged. Its time is computed from the time of the first log line and the speed of later steps.
    This is an upper bound, because later steps are faster than the first ones.

    Args:
        arguments: recipe and options of the command, without --out.
        batch_size: images per step.
        seconds: approximate duration of the measurement, after the warm-up.
        gpu: UUID of the GPU to watch, or None.
        start_s: time that the warm-up may take.
    """
    with TemporaryDirectory() as directory:
        run, messages = Path(directory, "run"), Path(directory, "messages")
        every = ["--validate-every", NEVER, "--checkpoint-every", NEVER, "--loggers", "csv"]
        command = [sys.executable, "-m", "caaseg", "train", *arguments, "--out", str(run), *every]

        def lines() -> list[dict[str, Any]]:
            return [line for line in read_metrics(run / METRICS) if "images_per_second" in line]

        def wait_until(done: Callable[[], bool], limit_s: float) -> float:
            end = time.perf_counter() + limit_s
            while not done():
                if process.poll() is not None or time.perf_counter() > end:
                    text = messages.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                    raise CaasegError(
                        f"caaseg train {' '.join(arguments)}: ended, or logged too few steps, before it was measured; "
                        f"its last message: {' '.join(text)}"
                    )
                time.sleep(0.02)
            return time.perf_counter()

        start = time.perf_counter()
        with messages.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            first_line_s = wait_until(lambda: len(lines()) > 0, start_s) - start
            warm = wait_until(lambda: len(lines()) > WARMUP_LINES, start_s)
            with _sampled_utilization(gpu) as utilization:
                wait_until(
                    lambda: time.perf_counter() > warm + seconds and len(lines()) > 2 * WARMUP_LINES, seconds + start_s
                )
            measured = lines()[WARMUP_LINES:]
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()
    speed = statistics.harmonic_mean([line["images_per_second"] for line in measured])  # lines have as many images
    return TrainingSpeed(
        steps=len(measured) * LOG_EVERY,
        images_per_second=speed,
        waiting=statistics.mean(line["waiting"] for line in measured),
        first_step_s=first_line_s - (LOG_EVERY - 1) * batch_size / speed,
        gpu_utilization=statistics.mean(utilization) / 100 if utilization else None,
    )


@contextmanager
def _sampled_utilization(gpu: str | None) -> Iterator[list[float]]:
    """Yield a list that has the utilization of a GPU in percent at the end: the share of time with a running kernel."""
    samples: list[float] = []
    if gpu is None:
        yield samples
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    sampler = subprocess.Popen(
        ["nvidia-smi", f"--id={gpu}", *query, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield samples
    finally:
        sampler.terminate()
        output, _ = sampler.communicate()
        samples += [float(line) for line in output.split() if line.isdecimal()]


def write_folder(directory: Path, number: int, size: tuple[int, int], num_classes: int) -> None:
    """Write synthetic scenes as a folder dataset, half of the images JPEG and half PNG, with many classes.

    Args:
        directory: a new directory.
        number: number of images.
        size: their height and width.
        num_classes: number of classes in the masks.
    """
    scenes = Scenes(length=number, size=size)
    for name in ("images", "masks"):
        (directory / name).mkdir(parents=True)
    bands = np.arange(size[1]) * num_classes // size[1]
    for index in range(number):
        sample = scenes[index]
        label = np.where(sample.label == IGNORE, IGNORE, (sample.label.numpy() + bands) % num_classes)
        image = Image.fromarray(sample.image.permute(1, 2, 0).numpy())
        image.save(directory / "images" / f"{index}.{'jpg' if index % 2 else 'png'}")
        Image.fromarray(label.astype(np.uint8)).save(directory / "masks" / f"{index}.png")
    classes = ", ".join(f"class {k}" for k in range(num_classes))
    (directory / "classes.yaml").write_text(f"classes: [{classes}]\nignore: [{IGNORE}]\n", encoding="utf-8")
