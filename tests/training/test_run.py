"""Training runs: learning, the run directory, stopping, resuming, and error messages."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import caaseg
from caaseg.benchmarks.timing import LiveTensors
from caaseg.cli import main
from caaseg.errors import CaasegError
from caaseg.models.fused_norm import FusedSyncBatchNorm, fuse_batch_norm
from caaseg.recipes import load_recipe
from caaseg.training.checkpoints import read_checkpoint
from caaseg.training.loop import can_capture_graph
from caaseg.training.memory import check_cache_fits, check_device_cache_fits, min_step_bytes, try_step
from caaseg.training.metrics_log import MetricsLog, read_metrics
from caaseg.training.run import train
from caaseg.training.setup import (
    Processes,
    build_model,
    is_batch_norm_synchronized,
    open_split,
    resolve_processes,
    synchronize_batch_norm,
)
from caaseg.training.step_log import NonFiniteLossError, Progress, StepLog
from tests.small_models import small_model
from tests.training.small import SMALL_ARGUMENTS, images_and_masks, small_recipe

HEADS = Path(__file__).with_name("failing_heads.py")


def weights(run: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / kind / "model.safetensors")


def assert_identical(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_small_run_learns_and_writes_its_run_directory(tmp_path: Path) -> None:
    reported: list[Progress] = []
    arguments = ["--steps", "30", "--batch_size", "4", "--validate_every", "10", "--optimizer.lr", "0.005"]
    recipe = small_recipe(*arguments, "--checkpoint_every", "30", "--optimizer.ema", "0.9")
    result = train(recipe, tmp_path / "run", device="cpu", progress=reported.append)

    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    scores = [line["val_mean_iou"] for line in lines if "val_mean_iou" in line]
    assert [line["step"] for line in lines if "loss" in line] == [10, 20, 30]
    assert losses[-1] < 0.95 * losses[0]
    assert len(scores) == 3
    best = 10 * (1 + int(np.argmax(scores)))
    assert result[:6] == (tmp_path / "run", 30, True, scores[-1], max(scores), best)
    assert result.evaluation is not None
    assert result.evaluation.mean_iou == scores[-1]  # the final model is scored once
    assert result.best_worst is not None
    assert len(result.best_worst.best) + len(result.best_worst.worst) == 6
    assert [progress.step for progress in reported] == [10, 10, 20, 20, 30, 30]
    assert [progress.is_validation for progress in reported] == 3 * [False, True]
    assert [progress.mean_iou for progress in reported if progress.is_validation] == scores

    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"recipe.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "best", "model"}
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == recipe
    model = caaseg.load_model(tmp_path / "run")
    assert model.config.classes is not None
    assert "amber house" in model.config.classes
    assert "30 of 30 steps of 4 images on scenes." in (tmp_path / "run" / "model" / "README.md").read_text()


def test_a_new_run_does_not_overwrite_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    arguments += ["--steps", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "training: step 2 of 2, loss " in out
    assert "training: step 2 of 2: validation, mean IoU " in out
    assert "best mean IoU on val: " in out
    assert f"model: {tmp_path / 'run' / 'model'}" in out
    assert main(arguments) == 2
    assert "run: contains a run; resume it with --resume auto, or choose another --out" in capsys.readouterr().err
    assert main([*arguments, "--optimizer.lr", "0.5", "--resume", "auto"]) == 2
    error = capsys.readouterr().err
    assert "the run has different settings: optimizer.lr was 0.002 and is 0.5; use the same, or another --out" in error
    before = weights(tmp_path / "run")
    assert main([*arguments, "--resume", "auto"]) == 0  # the run is finished: nothing is trained
    assert_identical(weights(tmp_path / "run"), before)


def test_a_run_that_fails_in_its_first_step_leaves_the_directory_free_for_other_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 1"):
        train(small_recipe("--model.head", f"{HEADS}:TooLargeHead"), tmp_path / "run", device="cpu")
    assert train(small_recipe("--steps", "1"), tmp_path / "run", device="cpu").finished


def test_skipping_of_bad_files_may_be_switched_on_when_resuming(tmp_path: Path) -> None:
    train(small_recipe("--steps", "1"), tmp_path / "run", device="cpu")
    again = small_recipe("--steps", "1", "--data.bad_files", "skip")
    assert train(again, tmp_path / "run", device="cpu", resume="auto").finished


def test_a_run_stopped_by_sigterm_and_resumed_ends_with_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    arguments = ["--steps", "14", "--checkpoint_every", "100", "--validate_every", "14", "--data.workers", "1"]
    recipe = small_recipe(*arguments, "--optimizer.clip_grad_norm", "1.0")
    before = signal.getsignal(signal.SIGTERM)

    def terminate(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(recipe, tmp_path / "stopped", device="cpu", progress=terminate)
    assert not stopped.finished
    assert 10 <= stopped.step < 14
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == [f"step-{stopped.step:08d}.pt"]
    assert not (tmp_path / "stopped" / "model").exists()
    assert signal.getsignal(signal.SIGTERM) == before

    assert train(recipe, tmp_path / "stopped", device="cpu", resume="auto").finished
    assert train(recipe, tmp_path / "whole", device="cpu", resume="auto").finished
    assert_identical(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    steps = [[line["step"] for line in read_metrics(tmp_path / run / "metrics.jsonl")] for run in ("stopped", "whole")]
    assert steps[0] == steps[1] == [10, 14, 14]


def test_speed_excludes_validation(tmp_path: Path) -> None:
    seconds = 0.0
    reported: list[Progress] = []
    recipe = small_recipe("--steps", "40")
    with StepLog(recipe, MetricsLog(tmp_path, 0), 0, reported.append, clock=lambda: seconds) as log:
        for step in range(1, 41):
            with log.waiting():
                seconds += 0.25
            seconds += 0.75
            log.step(step, torch.tensor(1.0), ("a.png",), torch.tensor(1))
            if step % 20 == 0:
                log.flush()
                seconds += 1000  # a validation
                log.restart_clock(step)
    # At the end of step 10 the clock shows 10 s; at the end of step 40 it shows 1,040 s.
    assert [progress.seconds_left for progress in reported[:4:3]] == pytest.approx([30, 0], abs=4)
    # Two images per second; the loss of a step is read during the next step.
    assert [progress.images_per_second for progress in reported] == pytest.approx([2, 2, 2, 2], rel=0.2)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["waiting"] for line in lines] == pytest.approx([0.25] * 4, rel=0.1)


@pytest.mark.parametrize("head", ["caa", "emanet"])
def test_a_run_resumes_from_the_path_of_a_checkpoint(head: str, tmp_path: Path) -> None:
    recipe = small_recipe("--steps", "4", "--checkpoint_every", "2", "--model.head", head)
    train(recipe, tmp_path / "whole", device="cpu")
    path = tmp_path / "whole" / "checkpoints" / "step-00000002.pt"
    train(recipe, tmp_path / "other", device="cpu", resume=path)
    assert_identical(weights(tmp_path / "other"), weights(tmp_path / "whole"))


def test_runs_with_deterministic_algorithms_and_bf16_are_identical(tmp_path: Path) -> None:
    arguments = ["--precision", "bf16", "--deterministic", "true", "--channels_last", "false", "--steps", "2"]
    try:
        for run in ("first", "second"):
            train(small_recipe(*arguments, "--loss.class_weights", "log"), tmp_path / run, device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_identical(weights(tmp_path / "first"), weights(tmp_path / "second"))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step_and_the_files(tmp_path: Path) -> None:
    recipe = small_recipe("--checkpoint_every", "1", "--model.head", f"{HEADS}:NaNHead")
    message = r"step 3: the loss is nan for the files train-0-00000\d, train-0-00000\d; expected a finite value; check"
    with pytest.raises(NonFiniteLossError, match=message):
        train(recipe, tmp_path / "run", device="cpu")
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000001.pt", "step-00000002.pt"]  # weights after the bad loss are not saved


def test_running_out_of_memory_gives_a_message_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="step 1: 2 crops of 64 x 64 do not fit in the memory of the device; set a small"
    ):
        train(small_recipe("--model.head", f"{HEADS}:TooLargeHead"), tmp_path / "run", device="cpu")


@pytest.mark.slow
def test_a_compiled_model_is_trained_and_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "caaseg", "train", "scenes/fcn_resnet18", "--device", "cpu", *SMALL_ARGUMENTS]
    arguments = ["--compile", "true", "--steps", "3", "--optimizer.ema", "0.9", "--out", str(tmp_path / "run")]
    subprocess.run([*command, *arguments], check=True, capture_output=True)
    assert caaseg.load_model(tmp_path / "run").config.head == "fcn"


@pytest.mark.parametrize(
    ("device", "gpus", "setting", "synchronized"),
    [("cuda", 1, "true", False), ("cuda", 2, "true", True), ("cuda", 2, "false", False), ("cpu", 2, "true", False)],
)
def test_several_gpus_use_synchronized_batch_norm(device: str, gpus: int, setting: str, synchronized: bool) -> None:
    recipe = small_recipe("--sync_batch_norm", setting)
    assert is_batch_norm_synchronized(recipe, Processes(torch.device(device), gpus, 1)) == synchronized


def test_synchronized_batch_norm_is_fused_but_not_captured_and_batch_norm_per_gpu_is_both() -> None:
    recipe = small_recipe("--cuda_graph", "true")
    model = build_model(recipe, open_split(recipe, "train"))
    assert can_capture_graph(recipe, model, ranks=1)
    assert can_capture_graph(recipe, model, ranks=2)
    model = synchronize_batch_norm(model)
    assert not can_capture_graph(recipe, model, ranks=2)
    fuse_batch_norm(model)
    assert not can_capture_graph(recipe, model, ranks=2)
    assert {type(part) for part in model.modules() if isinstance(part, nn.SyncBatchNorm)} == {FusedSyncBatchNorm}


def test_a_head_that_communicates_in_its_forward_pass_is_captured_on_a_single_gpu_only() -> None:
    recipe = small_recipe("--cuda_graph", "true", "--model.head", "emanet")
    model = build_model(recipe, open_split(recipe, "train"))
    assert can_capture_graph(recipe, model, ranks=1)
    assert not can_capture_graph(recipe, model, ranks=2)


def test_a_recipe_sets_the_momentum_of_batch_norm(tmp_path: Path) -> None:
    model = small_model(num_classes=8)
    train(small_recipe("--batch_norm_momentum", "0.25", "--steps", "1"), tmp_path, device="cpu", model=model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert {norm.momentum for norm in norms} == {0.25}


def test_processes_come_from_torchrun_slurm_or_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_processes("cpu", 3) == (torch.device("cpu"), 3, 1)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert resolve_processes("cpu", 1) == (torch.device("cpu"), 4, 2)
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # an interactive shell is not a job
    assert resolve_processes("cpu", 1) == (torch.device("cpu"), 1, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert resolve_processes("cpu", 1) == (torch.device("cpu"), 2, 3)
    with pytest.raises(ValueError, match="devices is 0; expected 1 or more"):
        resolve_processes("cpu", 0)
    with pytest.raises(ValueError, match="device is cuda:1, a single GPU, but devices is 2; use device cuda"):
        resolve_processes("cuda:1", 2)


@pytest.mark.parametrize("file", ["images/2.jpg", "masks/2.png"])
@pytest.mark.parametrize("weights", ["none", "log"])
def test_a_damaged_file_among_a_few_images_is_skipped_on_request(
    file: str, weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images_and_masks(tmp_path / "mine", number=8)
    (tmp_path / "mine" / file).write_bytes((tmp_path / "mine" / file).read_bytes()[:20])
    data = ("--data.dataset", "folder", "--data.root", str(tmp_path / "mine"), "--data.crop", "48", "48")
    options = (*data, "--steps", "6", "--loss.class_weights", weights)
    with pytest.raises(CaasegError, match=re.escape(str(tmp_path / "mine" / file))):
        train(small_recipe(*options), tmp_path / "stopped", device="cpu")
    with caplog.at_level(logging.WARNING):
        result = train(small_recipe(*options, "--data.bad_files", "skip"), tmp_path / "run", device="cpu")
    assert result.finished
    assert f"skipped {tmp_path / 'mine' / file}: " in caplog.text


def test_a_folder_of_six_images_trains_and_fine_tunes_from_other_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    train(small_recipe("--steps", "1"), tmp_path / "scenes", device="cpu")
    images_and_masks(tmp_path / "mine")
    arguments = [
        "train",
        "folder/caa_resnet18",
        "--data.root",
        str(tmp_path / "mine"),
        "--device",
        "cpu",
        *SMALL_ARGUMENTS,
    ]
    arguments += ["--data.crop", "48", "48", "--steps", "1"]
    with caplog.at_level(logging.WARNING):
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert "found 2 classes in the masks" in caplog.text
    assert caaseg.load_model(tmp_path / "run").config.classes == ("0", "1")

    tuned = [*arguments, "--init-from", str(tmp_path / "scenes"), "--out", str(tmp_path / "tuned")]
    with caplog.at_level(logging.WARNING):
        assert main(tuned) == 0
    assert "loaded backbone test_resnet and head caa at output stride 16; the classifiers are new, bec" in caplog.text
    first, after = weights(tmp_path / "scenes"), weights(tmp_path / "tuned")
    distance = (first["backbone.net.conv1.0.weight"] - after["backbone.net.conv1.0.weight"]).abs().max()
    assert distance < 0.01  # one small step from the initial weights
    config = json.loads((tmp_path / "tuned" / "model" / "config.json").read_text())
    assert config["num_classes"] == 2

    capsys.readouterr()
    other = [
        *arguments,
        "--init-from",
        str(tmp_path / "scenes"),
        "--out",
        str(tmp_path / "x"),
        "--model.channels",
        "32",
    ]
    assert main(other) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'scenes'}: its weights do not fit, because it has channels" in err
    assert "instead of 32; set the same values with --model.NAME, or leave these options out" in err


def test_a_run_trains_on_two_joined_splits(tmp_path: Path) -> None:
    train(small_recipe("--data.train_split", "train+val", "--steps", "1"), tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "model").is_dir()


def test_cached_data_gives_the_same_weights_and_may_be_switched_off_on_resume(tmp_path: Path) -> None:
    arguments = ("--loss.class_weights", "log", "--steps", "4")
    read, cached = small_recipe(*arguments), small_recipe(*arguments, "--data.cache", "true", "--data.workers", "1")
    expected = train(read, tmp_path / "read", device="cpu")
    assert train(cached, tmp_path / "cached", device="cpu")[1:6] == expected[1:6]
    assert_identical(weights(tmp_path / "cached"), weights(tmp_path / "read"))
    assert train(read, tmp_path / "cached", device="cpu", resume="auto").finished


def test_a_cache_larger_than_the_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    assert main([*arguments, "--data.cache", "true", "--data.scenes.length", "1000000000"]) == 2
    error = capsys.readouterr().err
    assert "data.cache is true, but the decoded images need about 32,768.0 GB and " in error
    assert "GB of memory are free; set data.cache false to read them from their files in each step" in error
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"need about 0\.0 GB per process, in 1000000000 processes, and"):
        check_cache_fits(1_000_000, 1_000_000_000)


def test_data_on_the_device_gives_nearly_the_same_losses_and_resumes_with_identical_weights(tmp_path: Path) -> None:
    more = ("--data.rotation", "10", "--data.blur", "0.5", "--loss.class_weights", "log", "--checkpoint_every", "2")
    cached, on_device = (small_recipe(*more, "--data.cache", cache) for cache in ("true", "device"))
    train(cached, tmp_path / "cached", device="cpu")
    train(on_device, tmp_path / "whole", device="cpu")
    expected, found = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("cached", "whole"))
    for line, expected_line in zip(found, expected, strict=True):
        if "loss" in expected_line:
            assert line["loss"] == pytest.approx(expected_line["loss"], rel=0.01)

    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    stopped = train(on_device, tmp_path / "stopped", device="cpu", progress=interrupt)
    assert not stopped.finished
    with pytest.raises(ValueError, match=r"data\.cache was device and is True; use the same, or another --out"):
        train(cached, tmp_path / "stopped", device="cpu", resume="auto")
    assert train(on_device, tmp_path / "stopped", device="cpu", resume="auto").finished
    assert_identical(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


def test_a_dataset_larger_than_the_device_is_refused() -> None:
    message = r"need 5,000,000,000 bytes and 4,000,000,000 bytes are free on cuda:0; set data\.cache true to hold them"
    with pytest.raises(ValueError, match=message):
        check_device_cache_fits(5_000_000_000, 4_000_000_000, "cuda:0")
    check_device_cache_fits(4_000_000_000, 4_000_000_000, "cuda:0")


def test_ctrl_c_stops_a_run_after_a_checkpoint(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    arguments = ["--steps", "14", "--checkpoint_every", "100", "--validate_every", "14"]
    stopped = train(small_recipe(*arguments), tmp_path / "run", device="cpu", progress=interrupt)
    assert (stopped.finished, stopped.stopped_by) == (False, signal.SIGINT)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{stopped.step:08d}.pt"]
    assert signal.getsignal(signal.SIGINT) == before


def test_speed_after_a_checkpoint_counts_only_the_steps_since_then(tmp_path: Path) -> None:
    """If all steps of the run were counted, the last speed would be ten times too high."""
    arguments = ["--steps", "50", "--checkpoint_every", "45", "--validate_every", "50", "--model.head", "fcn"]
    train(small_recipe(*arguments), tmp_path / "run", device="cpu")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    speeds = {line["step"]: line["images_per_second"] for line in lines}
    others = [speed for step, speed in speeds.items() if step != 50]
    assert speeds[50] < 4 * max(others)


def test_a_crop_larger_than_all_memory_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    assert main([*arguments, "--data.crop", "1000000x1000000"]) == 2
    error = capsys.readouterr().err
    assert "before the first step: 2 crops of 1000000 x 1000000 do not fit in the memory of the device; set a" in error
    assert "a larger accumulate, or precision bf16 (they need at least 90,250.0 GB, and this machine has" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [(), ("--model.input_upsampling", "2")])
def test_the_lower_bound_of_memory_is_below_the_memory_of_a_step(arguments: tuple[str, ...]) -> None:
    """A higher bound would refuse runs that fit."""
    recipe = small_recipe("--model.head", "fcn", *arguments)
    model = build_model(recipe, open_split(recipe, "train"))
    images = torch.zeros(2, 3, *recipe.data.crop)
    live = LiveTensors([images])
    with live:
        model(images).logits.sum().backward()
    assert 0.05 * live.peak_bytes < min_step_bytes(recipe, 2, 8) < live.peak_bytes


def test_a_step_that_does_not_fit_in_memory_is_reported_before_the_first_step() -> None:
    def full() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recipe = small_recipe()
    model = build_model(recipe, open_split(recipe, "train"))
    with pytest.raises(ValueError, match="before the first step: 2 crops of 64 x 64 do not fit in the memory of the"):
        try_step(model, full, 2, recipe, 2)


def test_a_model_with_input_upsampling_and_a_decoder_learns(tmp_path: Path) -> None:
    arguments = ["--model.input_upsampling", "2", "--model.decoder", "true", "--model.aux", "true", "--steps", "20"]
    arguments += ["--data.crop", "[33, 40]", "--validate_every", "20", "--checkpoint_every", "20"]
    train(small_recipe(*arguments), tmp_path / "run", device="cpu")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[1] < losses[0]
    assert caaseg.load_model(tmp_path / "run").config.input_upsampling == 2


@pytest.mark.parametrize("head", ["caa", "danet", "emanet"])
def test_trying_a_step_changes_nothing(head: str) -> None:
    recipe = small_recipe("--model.head", head, "--model.aux", "true")
    model = build_model(recipe, open_split(recipe, "train")).train()
    before, random = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    calls = []

    def loss() -> torch.Tensor:
        calls.append(1)
        return model.coarse(torch.randn(2, 3, 64, 64)).logits.square().sum()

    try_step(model, loss, 2, recipe, 2)
    assert calls == [1]
    assert_identical(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_warm_up_longer_than_the_run_is_shortened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(small_recipe("--steps", "20", "--optimizer.warmup_steps", "20"), tmp_path / "run", device="cpu")
    assert "optimizer.warmup_steps is 20, but the run has 20 steps: the warm-up is shortened to 2 steps" in caplog.text
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert lines[0]["lr"] == pytest.approx(
        0.002 * (1 - 9 / 20) ** 0.9
    )  # the rate of the schedule, without a warm-up factor


def test_the_best_model_is_the_first_of_several_with_the_same_score(tmp_path: Path) -> None:
    """With a learning rate of 0 all scores are equal."""
    arguments = ["--steps", "3", "--validate_every", "1", "--optimizer.lr", "0", "--optimizer.weight_decay", "0"]
    result = train(small_recipe(*arguments, "--optimizer.ema", "0.5"), tmp_path / "run", device="cpu")
    scores = [line["val_mean_iou"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" not in line]
    assert len(scores) == 3
    assert result.best_step == 1 + scores.index(max(scores))


def test_the_logged_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    recipe = small_recipe("--steps", "20", "--optimizer.warmup_steps", "0", "--model.head", "fcn")
    train(recipe, tmp_path / "run", device="cpu")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000020.pt")
    assert [line["step"] for line in lines] == [10, 20]
    assert lines[1]["lr"] == pytest.approx(state["optimizer"]["param_groups"][0]["lr"])
    assert lines[1]["lr"] == pytest.approx(0.002 * (1 - 19 / 20) ** 0.9)


def test_ema_weights_are_averaged_with_the_decay_of_their_step(tmp_path: Path) -> None:
    """In step k, from 0, the decay is (1 + k) / (10 + k) if that is smaller than the decay of the recipe."""
    arguments = ["--steps", "2", "--checkpoint_every", "1", "--optimizer.ema", "0.999", "--model.head", "fcn"]
    train(small_recipe(*arguments), tmp_path / "run", device="cpu")
    first, second = (read_checkpoint(tmp_path / "run" / "checkpoints" / f"step-0000000{k}.pt") for k in (1, 2))
    name, decay = "backbone.net.conv1.0.weight", 2 / 11
    expected = decay * first["ema"][name] + (1 - decay) * second["model"][name]
    torch.testing.assert_close(second["ema"][name], expected)
    assert not torch.equal(first["ema"][name], second["model"][name])


def test_epochs_determine_the_steps_and_the_saved_recipe_has_both(tmp_path: Path) -> None:
    recipe = small_recipe("--model.head", "fcn").replace(epochs=0.5)  # 6 images, batches of 2
    result = train(recipe, tmp_path / "run", device="cpu")
    assert (result.step, result.recipe.steps) == (2, 2)
    saved = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (saved.epochs, saved.steps) == (0.5, 2)
    assert train(recipe, tmp_path / "run", device="cpu", resume="auto").finished
    longer = load_recipe(tmp_path / "run" / "recipe.yaml", ["--steps", "7"])
    assert (longer.epochs, longer.steps) == (None, 7)


def test_early_stopping_ends_a_run_after_validations_without_a_better_score_also_when_resumed(tmp_path: Path) -> None:
    arguments = ["--steps", "20", "--validate_every", "2", "--checkpoint_every", "3", "--optimizer.lr", "0"]
    recipe = small_recipe(*arguments, "--early_stopping", "2", "--model.head", "fcn")
    result = caaseg.train(recipe, tmp_path / "whole", device="cpu")
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    scores = {line["step"]: line["val_mean_iou"] for line in lines if "val_mean_iou" in line}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert list(scores) == list(range(2, best + 5, 2))
    assert (result.step, result.finished, result.stopped_early, result.best_step) == (best + 4, True, True, best)
    assert result.evaluation is not None
    report = (tmp_path / "whole" / "report.html").read_text()
    assert f"{result.step} of 20 training steps with batch size 2, stopped early after 2 validations without" in report

    again = train(recipe, tmp_path / "whole", device="cpu", resume="auto")
    assert (again.step, again.finished, again.stopped_early) == (result.step, True, True)
    path = tmp_path / "whole" / "checkpoints" / f"step-{3 * ((result.step - 1) // 3):08d}.pt"
    resumed = train(recipe, tmp_path / "resumed", device="cpu", resume=path)
    assert resumed[1:6] == result[1:6]
    assert_identical(weights(tmp_path / "resumed"), weights(tmp_path / "whole"))


TRAINING_ARGUMENTS = SMALL_ARGUMENTS[SMALL_ARGUMENTS.index("--data.scenes.size") :]  # without the architecture


def test_a_run_that_starts_from_a_model_adopts_its_architecture_and_resumes_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = small_recipe("--steps", "1", "--model.head", "fcn", "--model.decoder", "true")
    train(first, tmp_path / "first", device="cpu")
    config = tmp_path / "first" / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "license": "CC-BY-NC-4.0"}))
    arguments = [*TRAINING_ARGUMENTS, "--optimizer.lr", "0", "--steps", "2", "--checkpoint_every", "1"]
    recipe = load_recipe("scenes/caa_resnet18", [*arguments, "--init-from", str(tmp_path / "first")])
    with caplog.at_level(logging.WARNING):
        train(recipe, tmp_path / "second", device="cpu")
    assert (
        "loaded backbone test_resnet and head fcn at output stride 16 with decoder; all weights are loaded"
        in caplog.text
    )
    saved = load_recipe(tmp_path / "second" / "recipe.yaml")
    assert (saved.init_from, saved.model) == (str(tmp_path / "first"), first.model)
    assert "the license of these weights, CC-BY-NC-4.0, applies to the new model too" in caplog.text
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert torch.equal(before["classifier.weight"], after["classifier.weight"])

    shutil.rmtree(tmp_path / "first")
    (tmp_path / "second" / "checkpoints" / "step-00000002.pt").unlink()
    shutil.rmtree(tmp_path / "second" / "model")
    train(recipe, tmp_path / "second", device="cpu", resume="auto")
    assert caaseg.load_model(tmp_path / "second").config.license == "CC-BY-NC-4.0"
    assert_identical(weights(tmp_path / "second"), after)


def test_a_classifier_for_other_classes_is_not_copied_even_if_their_number_is_equal(tmp_path: Path) -> None:
    recipe = small_recipe("--model.head", "fcn")
    data = open_split(recipe, "train")
    other = build_model(recipe.replace(seed=1), data)
    assert torch.equal(build_model(recipe, data, other).classifier.weight, other.classifier.weight)
    other.config = other.config.replace(classes=tuple(f"class {k}" for k in range(len(data.classes))))
    model = build_model(recipe, data, other)
    assert not torch.equal(model.classifier.weight, other.classifier.weight)
    assert_identical(model.backbone.state_dict(), other.backbone.state_dict())


@pytest.mark.parametrize("ema", ["none", "0.5"])
def test_a_frozen_backbone_keeps_its_weights_and_statistics(tmp_path: Path, ema: str) -> None:
    arguments = ["--steps", "2", "--validate_every", "1", "--model.head", "fcn", "--optimizer.ema", ema]
    recipe = small_recipe(*arguments, "--model.freeze_backbone", "true", "--checkpoint_every", "1")
    train(recipe, tmp_path / "run", device="cpu")
    initial = build_model(recipe, open_split(recipe, "train")).state_dict()
    trained = weights(tmp_path / "run")
    for name, tensor in initial.items():
        if name.startswith("backbone."):
            assert torch.equal(trained[name], tensor), name
    assert not torch.equal(trained["classifier.weight"], initial["classifier.weight"])
    path = tmp_path / "run" / "checkpoints" / "step-00000001.pt"
    train(recipe, tmp_path / "resumed", device="cpu", resume=path)
    assert_identical(weights(tmp_path / "resumed"), trained)


@pytest.mark.parametrize(
    ("backbone", "frozen"),
    [("test_resnet", ("conv1.", "bn1.", "layer1.")), ("test_vit", ("model.pos_embed", "model.blocks.0."))],
)
def test_frozen_stages_keep_their_weights_and_statistics(
    tmp_path: Path, backbone: str, frozen: tuple[str, ...]
) -> None:
    settings = ["--steps", "2", "--validate_every", "1", "--checkpoint_every", "2", "--optimizer.layer_decay", "0.9"]
    options = ["--model.head", "fcn", "--model.frozen_stages", "1", "--model.drop_path", "0.1"]
    recipe = small_recipe(*settings, *options, "--model.gradient_checkpointing", "--model.backbone", backbone)
    train(recipe, tmp_path / "run", device="cpu")
    initial = build_model(recipe, open_split(recipe, "train")).state_dict()
    trained = weights(tmp_path / "run")
    unchanged = [name for name, tensor in initial.items() if torch.equal(trained[name], tensor)]
    assert {name for name in initial if name.removeprefix("backbone.net.").startswith(frozen)} <= set(unchanged)
    assert not any(name.startswith(("backbone.net.layer2.", "backbone.net.model.blocks.1.")) for name in unchanged)


def test_gradient_checkpointing_with_compile_is_refused() -> None:
    with pytest.raises(CaasegError, match="gradient-checkpointing is true, but works with none of compile"):
        small_recipe("--model.gradient_checkpointing", "--compile")
