"""The command line: error messages, exit codes and help."""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from caaseg.cli import main
from caaseg.cli.exit_codes import exit_code
from caaseg.cli.terminal import write_json
from tests.cli import commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "caaseg needs a command: demo, evaluate, predict"),
        ("trian", "caaseg has no command 'trian'; expected demo, evaluate, "),
        ("data", "caaseg data needs a command: list, init, import, prepare, check, show"),
        ("data chek", "caaseg data has no command 'chek'; expected list, init, import, prepare, check, show"),
        ("data check folder", "--root is missing; see caaseg data check --help"),
        ("train", "RECIPE is missing; see caaseg train --help"),
        ("predict m", "INPUTS is missing; see caaseg predict --help"),
        ("evaluate m --dataset camvid --splt val", "unknown option --splt; did you mean --split?"),
        ("evaluate m --dataset camvid --zzz val", "unknown option --zzz; see caaseg evaluate --help"),
        ("evaluate m --dataset camvid more", "unexpected argument 'more'; see caaseg evaluate --help"),
        (
            "evaluate m --dataset camvid --scales",
            "--scales has no value; see caaseg evaluate --help",
        ),
        ("evaluate m --dataset camvid --output-stride 7", "--output-stride is 7; expected 8, 16 or 32"),
        (
            "evaluate m --dataset camvid --device cuad",
            "--device is 'cuad'; expected auto, cpu, cuda, cuda:N, mps; did you",
        ),
        ("reproduce tabel2 --out x", "TABLE is 'tabel2'; expected 'table1', 'table2', 'table3',"),
        (
            "reproduce table2 --out x --limit-minutes soon",
            "--limit-minutes is 'soon'; expected a valid number",
        ),
        ("benchmark model --batch x", "--batch is 'x'; expected a valid integer"),
        ("benchmark model --inference-only maybe", "unexpected argument 'maybe'; see caaseg benchmark model --help"),
    ],
)
def test_a_wrong_command_line_is_one_message(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"caaseg: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("evalute", "evaluate"), ("benchmrk", "benchmark")])
def test_a_misspelt_command_gets_the_nearest_one(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.endswith(f"did you mean {near}?\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--help"], "train       Train a model from a recipe."),
        (["data", "-h"], "check       Check every image and label"),
        (["benchmark", "model", "--help"], "--backbone"),
        (["--version"], "caaseg 0."),
    ],
)
def test_help_ends_with_exit_code_0(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"), [("demo", "interrupted; run the same command to continue"), ("app", "interrupted")]
)
def test_ctrl_c_is_exit_code_130(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(commands.interrupted, [command]) == 130
    assert capsys.readouterr().err == f"caaseg: {message}\n"


def test_a_missing_permission_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(commands.not_permitted, ["recipes"]) == 2
    assert capsys.readouterr().err.startswith("caaseg: locked/table.md: permission denied; choose another path")


def test_a_bug_shows_its_traceback_and_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(commands.broken, ["recipes"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("caaseg: this is a bug; please report it with the traceback above\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (commands.out_of_memory, "Cannot allocate memory"),
        (
            commands.without_worker,
            "DataLoader worker (pid 5) is killed by signal: Killed.; if the memory was full, use fewer workers; "
            "training continues with --resume auto",
        ),
    ],
)
def test_a_lack_of_memory_is_not_reported_as_a_bug(
    command: Callable[[], int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(command, ["recipes"]) == 2
    assert capsys.readouterr().err == f"caaseg: {message}\n"


def test_a_closed_pipe_ends_the_command_without_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert exit_code(commands.with_a_closed_pipe, ["recipes"]) == 141  # as shells report SIGPIPE
    assert capsys.readouterr().err == ""


def test_a_full_disk_behind_standard_output_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(OSError), open("/dev/full", "w") as full:  # closing it writes the rest of its buffer
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["recipes"]) == 2
    assert capsys.readouterr().err == "caaseg: [Errno 28] No space left on device\n"


def test_without_standard_output_there_is_no_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # after a shell's >&-
    write_json({"a": 1}, "-")
    assert main(["recipes"]) == 0
    assert capsys.readouterr().err == ""


def test_characters_outside_the_encoding_of_the_terminal_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["straße"]) == 2
    stream.flush()
    assert stream.buffer.getvalue().startswith(b"caaseg: caaseg has no command 'stra\\xdfe'; expected")


def test_a_thread_that_cannot_write_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("threading.excepthook", threading.__excepthook__)  # pytest turns it into a warning
    assert exit_code(commands.with_a_failing_thread, ["recipes"]) == 0
    assert capsys.readouterr().err == ""


def test_sigterm_deletes_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        exit_code(commands.with_a_signal, ["recipes"])
    assert end.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_debug_shows_the_traceback_of_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
