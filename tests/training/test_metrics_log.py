"""The metrics log of a killed and resumed run."""

import json
from pathlib import Path

from caaseg.training.metrics_log import FILE, MetricsLog, read_metrics


def test_entries_after_the_resumed_step_are_deleted(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for step in (10, 20, 30):
        log.write(step, {"loss": step / 10})
    log.close()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 40, "lo')  # an entry cut off by a kill

    log = MetricsLog(tmp_path, 20)
    log.write(30, {"loss": 3.5, "iou": {"road": 0.5, "sky": float("nan")}})
    log.sync()
    log.close()
    assert read_metrics(tmp_path / FILE) == [
        {"step": 10, "loss": 1.0},
        {"step": 20, "loss": 2.0},
        {"step": 30, "loss": 3.5, "iou": {"road": 0.5, "sky": None}},
    ]
    assert all(json.loads(line) for line in (tmp_path / FILE).read_text().splitlines())
    assert list((tmp_path / "tensorboard").glob("events.*"))
