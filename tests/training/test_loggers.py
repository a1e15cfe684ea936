"""Loggers: the values of metrics.jsonl, and no step twice after a resume."""

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from caaseg.cli import main
from caaseg.training.metrics_log import MetricsLog
from caaseg.training.run import train
from tests.training.small import SMALL_ARGUMENTS, small_recipe

Sent = list[tuple[int, dict[str, float]]]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with the interface of wandb that records the values it receives."""
    module: Any = ModuleType("wandb")
    module.sent, module.started, module.finished = Sent(), [], 0

    def log(values: dict[str, float], step: int) -> None:
        module.sent.append((step, values))

    def finish() -> None:
        module.finished += 1

    def init(**options: Any) -> Any:
        module.started.append(options)
        return SimpleNamespace(log=log, finish=finish)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with the interface of mlflow that records the values it receives."""
    module: Any = ModuleType("mlflow")
    module.sent, module.started, module.files, module.finished = Sent(), [], {}, 0

    def start_run(run_id: str | None, run_name: str) -> Any:
        module.started.append((run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new id"))

    def log_metrics(values: dict[str, float], step: int) -> None:
        module.sent.append((step, values))

    def end_run() -> None:
        module.finished += 1

    module.start_run, module.log_metrics, module.end_run = start_run, log_metrics, end_run
    module.log_dict = lambda content, name: module.files.update({name: content})
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def write_killed_and_resumed(run: Path, logger: str) -> None:
    """Write steps 10 to 30 and a validation after step 20, then resume from step 10 and write them again."""
    for start in (0, 10):
        log = MetricsLog(run, start, [logger], {"steps": 40})
        for step in range(start + 10, 41 if start else 31, 10):
            log.write(step, {"loss": step / 10})
            if step == 20:
                log.write(step, {"val_mean_iou": 0.5, "val_iou": {"road, wet": 0.5, "sky": float("nan")}})
        log.sync()
        log.close()


def test_csv_has_one_row_per_step_also_after_a_resume(tmp_path: Path) -> None:
    write_killed_and_resumed(tmp_path, "csv")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"]) for row in rows] == [("10", "1.0"), ("20", "2.0"), ("30", "3.0"), ("40", "4.0")]
    assert [row["val_iou/road, wet"] for row in rows] == ["", "0.5", "", ""]
    assert not (tmp_path / "tensorboard").exists()


def test_wandb_continues_its_run_and_gets_no_step_twice(tmp_path: Path, wandb: Any) -> None:
    write_killed_and_resumed(tmp_path, "wandb")
    validation = {"val_mean_iou": 0.5, "val_iou/road, wet": 0.5}
    assert wandb.sent == [(10, {"loss": 1}), (20, {"loss": 2}), (20, validation), (30, {"loss": 3}), (40, {"loss": 4})]
    first, second = wandb.started
    assert first == second
    assert (first["config"], first["resume"], len(first["id"])) == ({"steps": 40}, "allow", 32)
    assert wandb.finished == 2


def test_mlflow_continues_its_run_and_gets_no_step_twice(tmp_path: Path, mlflow: Any) -> None:
    write_killed_and_resumed(tmp_path, "mlflow")
    validation = {"val_mean_iou": 0.5, "val_iou/road_ wet": 0.5}  # MLflow does not allow commas in names
    assert mlflow.sent == [(10, {"loss": 1}), (20, {"loss": 2}), (20, validation), (30, {"loss": 3}), (40, {"loss": 4})]
    assert mlflow.started == [(None, tmp_path.name), ("new id", tmp_path.name)]
    assert mlflow.files == {"recipe.yaml": {"steps": 40}}
    assert mlflow.finished == 2


def test_a_run_writes_to_the_loggers_of_its_recipe_which_may_change_on_resume(tmp_path: Path, wandb: Any) -> None:
    recipe = small_recipe("--steps", "2", "--checkpoint_every", "1", "--model.head", "fcn", "--loggers", "csv,wandb")
    train(recipe, tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "metrics.csv").read_text().startswith("step,loss,lr,images_per_second,waiting,val_mean")
    assert [step for step, _ in wandb.sent] == [2, 2]
    assert wandb.started[0]["config"]["loggers"] == ["csv", "wandb"]
    assert train(recipe.replace(loggers=()), tmp_path / "run", device="cpu", resume="auto").finished


def test_a_logger_whose_package_is_missing_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = ["train", "scenes/caa_resnet18", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL_ARGUMENTS]
    assert main([*arguments, "--loggers", "wandb"]) == 2
    error = capsys.readouterr().err
    assert "loggers contains wandb, but this package cannot be imported" in error
    assert "install it with pip install 'caaseg[wandb]', or leave it out" in error
    assert not (tmp_path / "run").exists()
