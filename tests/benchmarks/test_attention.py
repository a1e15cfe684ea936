"""Benchmark of the attention implementations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from caaseg.attention import channelized_axial_attention
from caaseg.benchmarks import attention as benchmark
from caaseg.cli import main
from caaseg.cli.benchmark.attention import report_attention

CPU = torch.device("cpu")
SMALL = ["--channels", "8", "--key-channels", "4", "--groups", "1,2,16", "--seconds", "0", "--sizes"]
TINY = [*SMALL, "1x5x4,2x3x3"]


def run(*arguments: str) -> int:
    return main(["benchmark", "attention", "--device", "cpu", *arguments])


def test_the_command_writes_numbers_and_a_figure_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, figure = tmp_path / "new" / "out.json", tmp_path / "out.png"
    assert run(*SMALL, "1x5x4,1x33x33", "--dtypes", "float32", "--json", str(numbers), "--figure", str(figure)) == 0
    content = json.loads(numbers.read_text())
    records = content["measurements"]
    found = {(r["implementation"], r["groups"]) for r in records if r["height"] == 33}
    assert found == {
        ("axial", None),
        ("factorised", None),
        ("loop", None),
        *(("grouped", g) for g in (1, 2, 16)),
    }
    assert {r["groups"] for r in records if r["height"] == 5} == {None, 1, 2}  # both axes are shorter than 16
    assert {r["dtype"] for r in records} == {"float32"}
    assert all(r["agrees"] and r["forward_ms"] > 0 and r["training_ms"] > r["forward_ms"] / 2 for r in records)
    assert all(r["training_peak_bytes"] >= r["forward_peak_bytes"] > 0 for r in records)
    assert {"command", "commit", "hardware", "versions"} <= content.keys()
    claims = [r for r in content["ratios"] if r["height"] == 33 and r["implementation"] == "loop"]
    assert [r["paper_row_by_row_over_vectorized_time"] for r in claims] == [2.5]
    assert figure.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(capsys.readouterr().out.split())  # line breaks depend on the measured numbers
    assert "grouped, 16" in shown
    assert "the paper states 2.5 and 2" in shown
    assert f"figure: {figure}" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out.png"]  # no temporary files


def test_only_json_is_written_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "--dtypes", "float32,bfloat16", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert {record["dtype"] for record in json.loads(out)["measurements"]} == {"float32", "bfloat16"}
    assert "implementation" in err


CASES = benchmark.cases(
    [(1, 5, 4), (2, 3, 3)], ["float32"], ["axial", "factorised", "grouped", "loop"], [1, 2], channels=8, key_channels=4
)


def test_a_wrong_implementation_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*maps: Any, **options: Any) -> torch.Tensor:
        output = channelized_axial_attention(*maps, **options)
        return output * 1.01 if options["implementation"] == "loop" else output

    outcomes = list(benchmark.run(CASES, CPU, seconds=0, function=wrong))
    assert report_attention(outcomes, CPU) == 1
    assert "these disagree with float64 by more than rounding: loop, loop" in capsys.readouterr().out


def test_implementations_agree_on_lines_of_one_pixel_whose_keys_have_zero_gradient() -> None:
    cases = benchmark.cases([(1, 1, 4)], ["float32"], ["factorised", "loop"], [1], channels=8, key_channels=4)
    measured = [
        outcome for outcome in benchmark.run(cases, CPU, seconds=0) if isinstance(outcome, benchmark.Measurement)
    ]
    assert [outcome.agrees for outcome in measured] == [True, True]


def test_out_of_memory_is_reported_as_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    def allocating(*maps: Any, **options: Any) -> torch.Tensor:
        if options["groups"] == 2:
            torch.empty(10**14)  # fails in the CPU allocator
        return channelized_axial_attention(*maps, **options)

    outcomes = list(benchmark.run(CASES, CPU, seconds=0, function=allocating))
    assert report_attention(outcomes, CPU, json="-") == 0
    out, err = capsys.readouterr()
    failed = [r for r in json.loads(out)["measurements"] if r["out_of_memory"]]
    assert [r["groups"] for r in failed] == [2, 2]
    assert "out of memory" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "3x3"], "--sizes is ['3x3']; expected more values"),
        (["--sizes", "1x0x3"], "--sizes is ['1x0x3']; expected greater than or equal to 1"),
        (["--sizes", ","], "--sizes is []; expected at least 1 item after validation, not 0"),
        (["--groups", "0"], "--groups is [0]; expected greater than or equal to 1"),
        (
            ["--dtypes", "float8"],
            "--dtypes is ['float8']; expected 'float64', 'float32', 'bfloat16' or 'float16'; did you mean float64?",
        ),
        (
            ["--implementations", "fast"],
            "--implementations is ['fast']; expected 'axial', 'fused', 'factorised', 'grouped' or 'loop'",
        ),
        (["--channels", "0"], "--channels is 0; expected greater than or equal to 1"),
        (["--seconds", "-1"], "--seconds is -1; expected greater than or equal to 0"),
        (["--json", ""], "--json is ''; expected the name of a file"),
        (["--json", "/"], "--json is '/'; expected the name of a file"),
        (["--figure", "x.txt"], "--figure is 'x.txt'; expected a file name that ends in .png, .svg or .pdf"),
    ],
)
def test_bad_options_end_with_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert err == f"caaseg: {message}\n"
    assert out == ""


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["benchmark", "attention", "--device", "cuda"]) == 2
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--debug", "--sizes", "3x3") == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unwritable_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file where a directory is needed")
    assert run(*TINY, "--json", str(tmp_path / "taken" / "out.json")) == 2
    assert "taken" in capsys.readouterr().err


def test_the_lower_bound_counts_each_required_read_and_write_once() -> None:
    (case,) = benchmark.cases([(2, 3, 5)], ["float32"], ["axial"], [1], channels=7, key_channels=4)
    problem = benchmark.Problem.random(case, torch.device("cpu"))
    keys, values = 2 * 3 * 5 * 4 * 4, 2 * 3 * 5 * 7 * 4
    assert benchmark.moved_bytes(problem) == 2 * keys + 4 * values
    assert benchmark.moved_bytes(problem, backward=True) == 6 * keys + 10 * values


def test_cuda_graph_times_are_compared_with_the_lower_bound_and_with_grouped() -> None:
    fused, grouped = benchmark.cases([(1, 5, 5)], ["bfloat16"], ["fused", "grouped"], [2], channels=7, key_channels=4)
    ours = benchmark.Measurement(
        case=fused, forward_ms=2.0, training_ms=5.0, forward_graph_ms=1.0, training_graph_ms=4.0, floor_ms=0.5,
        training_floor_ms=0.8,
    )  # fmt: skip
    (record,) = benchmark.ratios([ours, benchmark.Measurement(case=grouped, forward_ms=30.0, training_ms=200.0)])
    assert (record["forward_graph_over_floor"], record["training_graph_over_floor"]) == (2.0, 5.0)
    assert (record["forward_graph_speedup_over_grouped_2"], record["training_graph_speedup_over_grouped_2"]) == (30, 50)
    assert record["training_speedup_over_grouped_2"] == 40
