"""The command line: messages for wrong ones, exit codes and help."""

import pytest

from caaseg.cli import main
from tests.cli import commands


@pytest.mark.parametrize(
    ("words", "message"),
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
        ("evaluate m --dataset camvid --output-stride 7", "--output-stride is 7; expected 8 or 16"),
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
def test_a_wrong_command_line_is_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"caaseg: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("evalute", "evaluate"), ("benchmrk", "benchmark")])
def test_a_misspelt_command_gets_the_nearest_one(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.endswith(f"did you mean {near}?\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--help"], "train       Train a model from a recipe."),
        (["data", "-h"], "check       Check every image and label"),
        (["benchmark", "model", "--help"], "--backbone"),
        (["--version"], "caaseg 0."),
    ],
)
def test_help_ends_with_exit_code_0(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"), [("demo", "interrupted; run the same command to continue"), ("app", "interrupted")]
)
def test_ctrl_c_is_exit_code_130(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command], lambda _: (commands.interrupted, {})) == 130
    assert capsys.readouterr().err == f"caaseg: {message}\n"


def test_a_missing_permission_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"], lambda _: (commands.not_permitted, {})) == 2
    assert capsys.readouterr().err.startswith("caaseg: locked/table.md: permission denied; choose another path")


def test_a_bug_shows_its_traceback_and_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"], lambda _: (commands.broken, {})) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("caaseg: this is a bug; please report it with the traceback above\n")


def test_debug_shows_the_traceback_of_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
