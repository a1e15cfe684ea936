"""The run directory: its lock, full disks, weights that are not finite, missing labels and damaged logs."""

import json
import logging
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import caaseg
from caaseg.cli import main
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE, Sample
from caaseg.errors import CaasegError
from caaseg.training.checkpoints import read_checkpoint, write_checkpoint
from caaseg.training.losses import CrossEntropy
from caaseg.training.metrics_log import FILE, MetricsLog, read_metrics
from caaseg.training.run import train
from caaseg.training.run_directory import lock_run
from caaseg.training.step_log import Progress
from tests import processes
from tests.training.small import SMALL_ARGUMENTS, small_recipe

FCN = ("--model.head", "fcn", "--steps", "2", "--validate_every", "2", "--checkpoint_every", "1")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arguments", [[], ["--resume", "auto"]])
def test_a_second_run_in_a_locked_directory_is_refused_and_writes_nothing(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def start_second(progress: Progress) -> None:
        if codes:
            return
        before = contents(tmp_path / "run")
        command = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run")]
        codes.append(main([*command, *SMALL_ARGUMENTS, *FCN, *arguments]))
        # The first run writes its TensorBoard events in a separate thread.
        after = {name: content for name, content in contents(tmp_path / "run").items() if "tensorboard" not in name}
        assert after == {name: content for name, content in before.items() if "tensorboard" not in name}

    assert train(small_recipe(*FCN), tmp_path / "run", device="cpu", progress=start_second).finished
    assert codes == [2]
    assert capsys.readouterr().err == (
        f"caaseg: {tmp_path / 'run'}: another process is training in this directory; wait until it ends, or choose "
        "another --out\n"
    )
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"recipe.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "best", "model"}


def lock_and_fork_worker(run: Path, sender: Connection) -> None:
    """Hold the lock of a run, fork a process as data loaders do, and send its id; then wait to be killed."""
    with lock_run(run):
        worker = os.fork()
        if worker == 0:
            signal.pause()
        sender.send(worker)
        signal.pause()


def test_the_lock_of_a_killed_run_is_free_although_its_data_workers_still_live(tmp_path: Path) -> None:
    receiver, sender = Pipe(duplex=False)
    process = processes.start(lock_and_fork_worker, tmp_path / "run", sender)
    worker = receiver.recv()
    try:
        with pytest.raises(CaasegError, match="another process is training"), lock_run(tmp_path / "run"):
            pass
        process.kill()
        process.join()
        with lock_run(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Make writes beyond this file size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_earlier_one(tmp_path: Path) -> None:
    state = {
        "step": 1,
        "model": {"weight": torch.zeros(100_000)},
        "ema": None,
        "optimizer": {},
        "scaler": {},
        "best": {},
    }
    first = write_checkpoint(tmp_path, state)
    message = r"step-00000002\.pt: cannot be written \(.* GB of disk space are free\); free some space"
    with file_size_limit(100_000), pytest.raises(CaasegError, match=message):
        write_checkpoint(tmp_path, state | {"step": 2})
    assert list((tmp_path / "checkpoints").iterdir()) == [first]
    assert read_checkpoint(first)["step"] == 1


def test_a_run_on_a_full_disk_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "train",
        "scenes/caa_resnet18",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        *SMALL_ARGUMENTS,
        *FCN,
    ]
    with file_size_limit(50_000):
        assert main([*arguments, "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"caaseg: {tmp_path / 'run' / 'best'}: cannot be written (")
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.part*"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "model/README.md", "best/README.md", "report.html"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_files_that_no_run_wrote_are_not_replaced(tmp_path: Path, name: str, resume: str | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(CaasegError, match=r"exists, but no run wrote it, because there is no .*recipe\.yaml; choose"):
        train(small_recipe(*FCN), tmp_path, device="cpu", resume=resume)
    assert contents(tmp_path) == {name: b"mine"}


def test_a_run_that_trained_nothing_leaves_no_file_that_stops_the_next(tmp_path: Path) -> None:
    with file_size_limit(50_000), pytest.raises(CaasegError, match="best: cannot be written"):
        train(small_recipe(*FCN, "--steps", "1"), tmp_path / "run", device="cpu")
    assert train(small_recipe(*FCN), tmp_path / "run", device="cpu").finished


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_directory_that_is_deleted_during_the_training_is_one_message(tmp_path: Path) -> None:
    def delete(progress: Progress) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    intervals = ("--steps", "12", "--validate_every", "12", "--checkpoint_every", "12")
    with pytest.raises(CaasegError, match="run: the run directory was moved or deleted during the training"):
        train(small_recipe(*FCN, *intervals), tmp_path / "run", device="cpu", progress=delete)


def test_the_checkpoint_of_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        train(small_recipe(*FCN, "--seed", seed), tmp_path / seed, device="cpu")
    shutil.copytree(tmp_path / "1" / "checkpoints", tmp_path / "2" / "checkpoints", dirs_exist_ok=True)
    with pytest.raises(CaasegError, match=r"step-00000002\.pt: the run has different settings: seed was 1 and is 2"):
        train(small_recipe(*FCN, "--seed", "2"), tmp_path / "2", device="cpu", resume="auto")


class ExplodingLoss(CrossEntropy):
    """A finite loss whose gradient is not finite in the second step."""

    calls = 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            logits.register_hook(lambda gradient: gradient * float("nan"))  # type: ignore[no-untyped-call]
        return super().__call__(logits, labels)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CaasegError, match=r"step 2: weights are not finite \(\S+ and \d+ more tensors\), so they are"):
        train(small_recipe(*FCN), tmp_path / "run", device="cpu", loss=ExplodingLoss())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001.pt"]
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "best").exists()


class WithoutLabels(Scenes):
    """Scenes whose pixels are all ignored."""

    def __getitem__(self, index: int) -> Sample:
        image, label, name = super().__getitem__(index)
        return Sample(image, torch.full_like(label, IGNORE), name)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_labeled_pixels_ends_the_run(tmp_path: Path, split: Literal["train", "val"]) -> None:
    scenes = (Scenes("train", length=4, size=(64, 64)), Scenes("val", length=4, size=(64, 64)))
    ignored = WithoutLabels(split, length=4, size=(64, 64))
    data = (ignored, scenes[1]) if split == "train" else (scenes[0], ignored)
    with pytest.raises(CaasegError, match=f"split {split} of scenes has no labeled pixel: all are ignored"):
        train(small_recipe(*FCN), tmp_path / "run", data=data, device="cpu")
    assert not (tmp_path / "run" / "model").exists()


def test_a_missing_model_of_a_finished_run_is_saved_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(run), *SMALL_ARGUMENTS, *FCN]
    assert main([*arguments, "--optimizer.ema", "0.9"]) == 0
    before = contents(run / "model")
    shutil.rmtree(run / "model")
    message = r"run: a run without model/: .* with caaseg train .* --resume auto, or use .*best"
    with pytest.raises(CaasegError, match=message) as error:
        caaseg.load_model(run)
    command = str(error.value).partition("with caaseg ")[2].partition(", or")[0]
    with caplog.at_level(logging.WARNING):
        assert main([*command.split(), "--device", "cpu"]) == 0
    assert "model: the model was missing and is saved again from the last checkpoint" in caplog.text
    assert contents(run / "model") == before
    assert load_file(run / "model" / "model.safetensors").keys() == caaseg.load_model(run).state_dict().keys()


def damaged_log(run: Path) -> None:
    log = MetricsLog(run, 0)
    for step in (1, 2, 3):
        log.write(step, {"loss": 1.0})
    log.close()
    lines = (run / FILE).read_text().splitlines(keepends=True)
    (run / FILE).write_text(lines[0] + '{"step": 2, "loss": 0.5.5}\n' + lines[2])


@pytest.mark.parametrize("line", ['{"step": 2, "lo\n', "[1]\n", '{"loss": 1.0}\n', "[" * 100_000 + "\n", "\0\0\n"])
def test_a_damaged_line_inside_the_log_is_named(tmp_path: Path, line: str) -> None:
    good = [json.dumps({"step": step}) + "\n" for step in (1, 3)]
    (tmp_path / FILE).write_text(good[0] + line + good[1])
    with pytest.raises(CaasegError, match=r"metrics\.jsonl: line 2 is damaged; expected a JSON object with the key"):
        read_metrics(tmp_path / FILE)
    (tmp_path / FILE).write_text(good[0] + line + line)  # at the end of the file: left by a killed process
    assert read_metrics(tmp_path / FILE) == [{"step": 1}]


def test_resuming_a_run_with_a_damaged_log_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(small_recipe(*FCN), run, device="cpu")
    (run / "checkpoints" / "step-00000002.pt").unlink()
    damaged_log(run)
    before = contents(run)
    arguments = [
        "train",
        "scenes/caa_resnet18",
        "--device",
        "cpu",
        "--out",
        str(run),
        *SMALL_ARGUMENTS,
        *FCN,
        "--resume",
        "auto",
    ]
    assert (
        main([*arguments, "--data.workers", "1"]) == 2
    )  # workers may change on resume: a run that is not refused would save the new value
    assert capsys.readouterr().err.startswith(f"caaseg: {run / FILE}: line 2 is damaged")
    assert contents(run) == before


def test_a_huge_number_of_workers_is_refused() -> None:
    with pytest.raises(CaasegError, match=r"--data\.workers is 100000; expected less than or equal to 256"):
        small_recipe("--data.workers", "100000")
