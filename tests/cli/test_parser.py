"""Command lines that are wrong: one sentence that says what was expected."""

import pytest

from caaseg import cli
from caaseg.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "caaseg needs a command: demo, evaluate, predict"),
        ("evalute m", "caaseg has no command 'evalute' (did you mean evaluate?); expected demo, evaluate,"),
        ("data", "caaseg data needs a command: list, prepare, check or show"),
        ("data chek", "caaseg data has no command 'chek' (did you mean check?); expected list, prepare, check or show"),
        ("data check folder", "caaseg data check needs --root; see caaseg data check --help"),
        ("train", "caaseg train needs RECIPE; see caaseg train --help"),
        ("predict m", "caaseg predict needs --out and INPUTS; see caaseg predict --help"),
        (
            "evaluate m --dataset camvid --splt val",
            "caaseg evaluate has no option --splt (did you mean --split?); see caaseg evaluate --help",
        ),
        ("evaluate m --dataset camvid more", "'more' is a word too many for caaseg evaluate; see caaseg evaluate"),
        ("evaluate m --dataset camvid --scales", "--scales has no value behind it; see caaseg evaluate --help"),
        ("evaluate m --dataset camvid --output-stride 7", "--output-stride is '7'; expected 8 or 16; see caaseg"),
        ("reproduce tabel2 --out x", "TABLE is 'tabel2' (did you mean table2?); expected table1, table2, table3,"),
        ("reproduce table2 --out x --limit-minutes soon", "--limit-minutes is 'soon'; expected a number; see caaseg"),
        ("benchmark model --batch x", "--batch is 'x'; expected a whole number; see caaseg benchmark model --help"),
        ("benchmark model --inference-only maybe", "--inference-only is 'maybe'; expected true or false; see caaseg"),
    ],
)
def test_one_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"caaseg: {said}")
    assert err.count("\n") == 1


def test_help_is_still_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["benchmark", "model", "--help"])
    assert end.value.code == 0
    assert "--backbone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"), [("demo", "interrupted; the same command goes on"), ("app", "interrupted")]
)
def test_what_is_interrupted_says_whether_it_goes_on(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_call", interrupted)
    assert main([command, *(["m"] if command == "app" else [])]) == 130
    assert capsys.readouterr().err == f"caaseg: {said}\n"


def test_a_place_that_is_not_permitted_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*given: object) -> int:
        raise PermissionError(13, "Permission denied", "locked/table.md")

    monkeypatch.setattr(cli, "_call", refused)
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err.startswith("caaseg: locked/table.md: permission denied; give another")
