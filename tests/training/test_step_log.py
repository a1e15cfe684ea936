"""On a GPU, reading the loss of a step does not wait for the next step's work."""

from pathlib import Path

import pytest
import torch

from caaseg.training.metrics_log import MetricsLog, read_metrics
from caaseg.training.step_log import StepLog
from tests.training.small import small_recipe


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_runs_ahead_of_the_gpu(tmp_path: Path) -> None:
    matrix = torch.randn(8192, 8192, device="cuda")
    recipe = small_recipe("--steps", "20")
    count = torch.tensor(1, device="cuda")  # outside the loop: this copy waits for the GPU
    busy = 0
    with StepLog(recipe, MetricsLog(tmp_path, 0), 0, None) as log:
        for step in range(1, 21):
            loss = torch.tensor(float(step), device="cuda")
            for _ in range(20):  # the work of a step: tens of milliseconds
                product = matrix @ matrix
            finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
            finished.record()
            log.step(step, loss + 0 * product[0, 0], ("a.png",), count)
            busy += not finished.query()  # type: ignore[no-untyped-call]
        log.flush()
    assert busy >= 18  # the loss of the previous step was read while this step was still computed
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20]
