"""Benchmark of inference on a CPU."""

import time
from pathlib import Path

import pytest

from caaseg.benchmarks.cpu import Timing, instructions, measure_in_turn, ratios
from caaseg.cli import main
from caaseg.reports.tables import cpu_table


def test_models_are_measured_in_turn_and_the_fastest_call_counts() -> None:
    calls: list[str] = []
    rounds: list[int] = []

    def slow_at_first() -> None:
        time.sleep(0.002 if calls.count("a") > 2 else 0.02)
        calls.append("a")

    runs = {("caa", "onnx"): slow_at_first, ("caa", "int8"): lambda: calls.append("b")}
    timings = measure_in_turn(runs, 2, lambda step, done, total: rounds.append(done))
    assert "".join(calls) == "ab" + 2 * "aaabbb"
    assert rounds == [1, 2]
    first, second = timings
    assert (first.model, first.form, second.form) == ("caa", "onnx", "int8")
    assert 0.002 <= first.seconds < 0.02
    assert first.median_s >= first.seconds > second.seconds
    assert first.images_per_second == 1 / first.seconds


def test_ratios_compare_the_fastest_forms() -> None:
    seconds = {
        "caa": {"eager": 1.2, "compiled": 1.0, "onnx": 0.9, "winograd": 0.6, "int8": 0.3},
        "torchvision:fcn": {"eager": 1.1, "compiled": 0.75, "onnx": 0.8},
    }
    timings = [Timing(model, form, s, s) for model, forms in seconds.items() for form, s in forms.items()]
    assert ratios(timings) == pytest.approx(
        {"caa_over_fcn": 1.25, "caa_over_fcn_plain": 0.75 / 0.9, "int8_over_onnx": 3}
    )
    assert cpu_table(timings).row_count == 8


def test_instructions_are_those_of_the_processor() -> None:
    assert set(instructions()) <= {"avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8"}


def test_a_directory_without_camvid_is_reported_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "cpu", "--root", str(tmp_path)]) == 2
    assert f"{tmp_path / 'train.txt'}: no such file; expected the split's list of names" in capsys.readouterr().err
