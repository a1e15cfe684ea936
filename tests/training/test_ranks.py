"""All ranks of a run end together."""

import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from caaseg.cli import main
from caaseg.errors import CaasegError
from caaseg.evaluation.evaluate import evaluate
from caaseg.models import load_model
from caaseg.models.predictor import Predictor
from caaseg.process_group import join_processes
from caaseg.recipes import load_recipe
from caaseg.training.checkpoints import read_checkpoint
from caaseg.training.metrics_log import read_metrics
from caaseg.training.ranks import (
    LostRankError,
    average_gradients,
    copy_first_state,
    end_together,
    freeze_unused_parameters,
    joined_ranks,
    match_gradient_strides,
)
from caaseg.training.setup import open_split, resolve_processes
from caaseg.training.stop_signals import StopSignals
from tests import processes
from tests.processes import exit_with_command, run_ranks
from tests.training.small import SMALL_ARGUMENTS

HEADS = Path(__file__).with_name("failing_heads.py")


def run_two_ranks(fault: str, out: Path) -> tuple[str, list[str]]:
    """Return the exit codes of both ranks, and the error messages of the command."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.two_ranks", fault, str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "Traceback" not in result.stderr, result.stderr
    messages = [line for line in result.stderr.splitlines() if line.startswith("caaseg: ")]
    return result.stdout.splitlines()[-1], messages


def fail_in_rank_1(rank: int, directory: Path) -> None:
    """Enter `end_together` without an error on both ranks, then with an error on rank 1."""
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=2)
    for failing in (None, 1):
        try:
            with end_together():
                if failing == rank:
                    raise CaasegError(f"no {rank}")
        except CaasegError as error:
            (directory / f"error-{rank}").write_text(str(error))
            sys.exit(2)


def test_an_error_of_any_rank_is_raised_by_the_first_and_ends_the_others(tmp_path: Path) -> None:
    ranks = [processes.start(fail_in_rank_1, rank, tmp_path) for rank in (0, 1)]
    assert processes.join(*ranks) == [2, 2]
    assert (tmp_path / "error-0").read_text() == "no 1"
    assert not (tmp_path / "error-1").exists()


def test_two_processes_train_a_model_with_unused_parameters(tmp_path: Path) -> None:
    command = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    command += ["--steps", "3", "--model.head", f"{HEADS}:UnusedLayerHead"]
    assert run_ranks(exit_with_command, command) == [0, 0]


def test_freezing_unused_parameters_changes_no_buffer_and_no_random_number() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3))
    buffers, random = [buffer.clone() for buffer in layers.buffers()], torch.get_rng_state()
    layers[0].bias.requires_grad_(False)
    freeze_unused_parameters(layers, lambda: layers[:3](torch.ones(2, 3)).sum())
    assert [weight.requires_grad for weight in layers.parameters()] == [True, False, True, True, False, False]
    assert all(torch.equal(now, before) for now, before in zip(layers.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.slow
def test_two_processes_validate_the_model_that_is_saved(tmp_path: Path) -> None:
    """On a CPU, each process has its own batch norm statistics."""
    intervals = ["--steps", "40", "--validate_every", "20", "--checkpoint_every", "20"]
    arguments = [*SMALL_ARGUMENTS, "--batch_size", "4", *intervals, "--optimizer.ema", "0.9"]
    command = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path), *arguments]
    assert run_ranks(exit_with_command, command) == [0, 0]
    (logged,) = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["step"] == 20 and "val_iou" in line]
    model = load_model(tmp_path / "model")
    model.load_state_dict(read_checkpoint(tmp_path / "checkpoints" / "step-00000020.pt")["ema"])
    found = evaluate(Predictor(model), open_split(load_recipe(tmp_path / "recipe.yaml"), "val"))
    assert (logged["val_pixel_accuracy"], logged["val_mean_iou"]) == (found.pixel_accuracy, found.mean_iou)


@pytest.mark.slow
def test_a_directory_that_the_first_rank_refuses_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    message = f"caaseg: {tmp_path / 'run'}: contains a run; resume it with --resume auto, or choose another --out"
    assert run_two_ranks("none", tmp_path / "run") == ("exit codes 2 2", [message])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "codes", "message"),
    [
        ("kill", "2 -9", "another process of this run has ended; see its message, then continue with --resume auto"),
        ("stop", "2 -9", "another process of this run does not answer; see its message, then continue with"),
        ("nan", "2 2", "step 2: the loss is nan for the files train-0-00000"),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_one_message(
    tmp_path: Path, fault: str, codes: str, message: str
) -> None:
    found, messages = run_two_ranks(fault, tmp_path / "run")
    assert found == f"exit codes {codes}"
    assert len(messages) == 1
    assert messages[0].startswith(f"caaseg: {message}")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001.pt"]


@pytest.mark.slow
def test_an_error_of_the_first_rank_ends_the_processes_that_it_started(tmp_path: Path) -> None:
    """The run fails when it saves its best model, because files must be smaller, as on a full disk."""
    arguments = [
        "train",
        "scenes/caa_resnet18",
        "--device",
        "cpu",
        "--devices",
        "2",
        "--out",
        str(tmp_path / "run"),
        *SMALL_ARGUMENTS,
    ]
    command = [sys.executable, "-W", "ignore", "-m", "caaseg", *arguments, "--model.head", "fcn"]
    # The pipe is closed when the last process that writes to it has ended.
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (50_000, 50_000))
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, preexec_fn=limit)
    assert result.returncode == 2
    messages = [line for line in result.stderr.splitlines() if line.startswith("caaseg: ")]
    assert len(messages) == 1, result.stderr
    assert messages[0].startswith(f"caaseg: {tmp_path / 'run' / 'best'}: cannot be written (")


def test_the_error_of_a_lost_rank_is_distinguished_from_other_errors() -> None:
    error = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
    with pytest.raises(LostRankError, match="another process of this run has ended; see its message"), joined_ranks():
        raise RuntimeError(error)
    with pytest.raises(RuntimeError, match="a bug"), joined_ranks():
        raise RuntimeError("a bug")


def test_gradients_get_the_strides_that_ddp_expects() -> None:
    """DDP warns about other strides; warnings are errors, so that `test_devices` shows this with two processes too."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    match_gradient_strides(layers)
    gradients = [torch.randn(parameter.shape) for parameter in layers.parameters()]  # contiguous
    torch.stack([(p * g).sum() for p, g in zip(layers.parameters(), gradients, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
    for parameter, expected in zip(layers.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, expected)


def gloo_threads() -> int:
    """Return the number of threads of this process that communicate with other ranks."""
    return sum("gloo" in (thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir())


def compare_with_ddp(directory: Path) -> None:
    """Compute gradients that differ between the ranks, averaged by DDP and by `average_gradients`."""
    with joined_ranks():
        dist.init_process_group("gloo")
        _compare_with_ddp()
    assert gloo_threads() == 0


def _compare_with_ddp() -> None:
    assert gloo_threads() > 0
    torch.manual_seed(dist.get_rank())  # other weights and images on each rank
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)).double()
    layers[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layers[2].bias.requires_grad_(False)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    copy_first_state(layers)
    copied = deepcopy(layers)
    match_gradient_strides(copied)
    wrapped = DistributedDataParallel(copied)  # a reference, so that it lives until the backward pass
    wrapped(images).square().sum().backward()
    layers(images).square().sum().backward()
    average_gradients(layers)
    for ours, expected in zip(layers.parameters(), copied.parameters(), strict=True):
        assert (ours.grad is None) == (expected.grad is None)
        if ours.grad is not None and expected.grad is not None:
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_gradients_averaged_by_hand_equal_those_of_ddp(tmp_path: Path) -> None:
    assert run_ranks(compare_with_ddp, tmp_path) == [0, 0]


def train_and_list_threads(command: list[str]) -> None:
    assert main(command) == 0
    assert gloo_threads() == 0


def test_threads_that_communicate_end_with_the_run(tmp_path: Path) -> None:
    """Such a thread aborts the process if it deletes a tensor while the interpreter ends."""
    command = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    command += ["--steps", "1", "--model.head", "fcn"]
    assert run_ranks(train_and_list_threads, command) == [0, 0]


def stop_with_signals(rank: int, signals: Sequence[int | None], directory: Path) -> None:
    """Send each rank its signal, if any; exit with the signal that this rank reports."""
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=2)
    with StopSignals(2, torch.device("cpu")) as stop:
        own = signals[rank]
        if own is not None:
            signal.raise_signal(own)
        while not stop.agreed():
            pass
    sys.exit(stop.signal)


@pytest.mark.parametrize(
    ("signals", "reported"),
    [((None, signal.SIGINT), signal.SIGINT), ((signal.SIGINT, signal.SIGTERM), signal.SIGTERM)],
)
def test_all_ranks_report_the_same_signal(signals: tuple[int | None, ...], reported: int, tmp_path: Path) -> None:
    ranks = [processes.start(stop_with_signals, rank, signals, tmp_path) for rank in (0, 1)]
    assert processes.join(*ranks) == [reported, reported]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, "the environment variable LOCAL_WORLD_SIZE is not set; expected a number, as"),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "x"}, "the environment variable SLURM_NNODES is not set; expected"),
        ({"SLURM_NTASKS": "x", "SLURM_NNODES": "1"}, "the environment variable SLURM_NTASKS is 'x'; expected a number"),
        ({"RANK": "5"}, "RANK, LOCAL_RANK or SLURM_PROCID is set and not 0, but neither torchrun nor SLURM started"),
    ],
)
def test_wrong_variables_of_torchrun_and_slurm_are_one_message(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CaasegError, match=message):
        resolve_processes("cpu", 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE is 'two'; expected a number"),
        ({"WORLD_SIZE": "2"}, "the environment variable RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK is 5, but WORLD_SIZE is 2; start all processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is 2, but .*MASTER_ADDR expected, but not set; start all"),
    ],
)
def test_wrong_variables_of_torchrun_are_one_message_in_other_commands(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CaasegError, match=message), join_processes(torch.device("cpu")):
        pass


def test_without_other_ranks_an_error_is_raised_unchanged() -> None:
    with pytest.raises(PermissionError, match="denied"), end_together():
        raise PermissionError("denied")
