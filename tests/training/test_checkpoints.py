"""Complete, damaged and incomplete checkpoints."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from caaseg.errors import CaasegError
from caaseg.training.checkpoints import check_finite, newest_good_checkpoint, read_checkpoint, write_checkpoint
from tests.small_models import small_model


def state(step: int) -> dict[str, Any]:
    weights = {"weight": torch.arange(1000.0) + step}
    return {"step": step, "model": weights, "ema": None, "optimizer": {"state": {}}, "scaler": {}, "best": {}}


def test_all_but_the_two_newest_checkpoints_are_deleted(tmp_path: Path) -> None:
    for step in (9, 10, 100, 101):
        write_checkpoint(tmp_path, state(step))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000100.pt",
        "step-00000101.pt",
    ]
    newest = newest_good_checkpoint(tmp_path)
    assert newest is not None
    assert newest["step"] == 101
    torch.testing.assert_close(newest["model"]["weight"], torch.arange(1000.0) + 101)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "pickle", "other"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, state(4))
    path = write_checkpoint(tmp_path, state(8))
    content = bytearray(path.read_bytes())
    if damage == "flipped":  # a bit inside a tensor, which only a checksum detects
        content[content.find(torch.arange(1000.0).add(8).numpy().tobytes()) + 100] ^= 1
    if damage in ("pickle", "other"):
        torch.save({"step": os.system} if damage == "pickle" else {"step": 3}, path)
    else:
        path.write_bytes(content[: {"empty": 0, "truncated": len(content) // 2}.get(damage, len(content))])
    with caplog.at_level(logging.WARNING):
        good = newest_good_checkpoint(tmp_path)
    assert good is not None
    assert good["step"] == 4
    assert "step-00000008.pt: " in caplog.text
    assert "falling back to the previous checkpoint" in caplog.text
    with pytest.raises(ValueError, match=r"step-00000008\.pt: (not a complete checkpoint|refused)"):
        read_checkpoint(path)


def test_a_checkpoint_without_read_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    write_checkpoint(tmp_path, state(4))
    monkeypatch.setattr("zipfile.ZipFile", refuse)  # the superuser may read all files
    with pytest.raises(PermissionError):
        newest_good_checkpoint(tmp_path)


def test_a_run_without_checkpoints_has_no_newest_checkpoint_and_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert newest_good_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match=r"gone\.pt: no such checkpoint; expected a file such as RUN/checkpoints"):
        read_checkpoint(tmp_path / "gone.pt")


def test_incomplete_files_of_killed_writers_are_ignored_and_deleted_by_the_next_write(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, state(4))
    half = tmp_path / "checkpoints" / ".step-00000008.0123456789ab.part.pt"
    half.write_bytes(b"half")
    newest = newest_good_checkpoint(tmp_path)
    assert newest is not None
    assert newest["step"] == 4
    write_checkpoint(tmp_path, state(8))
    assert not half.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": 0.5}, "expected dictionaries as config and data"),
        ({"data": {"train": 3}}, "expected dictionaries as config and data"),
        ({"config": []}, "expected dictionaries as config and data"),
        ({"best": {"a": 1}}, "expected the best step and its mean_iou"),
    ],
)
def test_a_checkpoint_with_values_of_wrong_types_is_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = write_checkpoint(tmp_path, {**state(4), **changes})
    with pytest.raises(CaasegError, match=rf"not a complete checkpoint \({reason}\)"):
        read_checkpoint(path)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_one_weight_that_is_not_finite_is_an_error(value: str) -> None:
    model = small_model("fcn")
    check_finite(7, model)
    with torch.no_grad():
        next(model.head.parameters()).view(-1)[-1] = float(value)
    with pytest.raises(CaasegError, match=r"step 7: weights are not finite \(head\.\S+ and 0 more tensors\)"):
        check_finite(7, model)
