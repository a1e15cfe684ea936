"""Text in the terminal: brackets are not markup, control characters are escaped. Training progress."""

from collections.abc import Callable, Iterator

import pytest
from rich.table import Table
from rich.text import Text

from caaseg.cli.exit_codes import exit_code
from caaseg.cli.terminal import console_for, printable, progress_bars, training_progress
from caaseg.training.step_log import Progress
from tests.cli import commands


def test_control_characters_and_undecodable_bytes_are_escaped() -> None:
    assert printable("photos/ä 木 [b].png") == "photos/ä 木 [b].png"
    assert printable("a\x1b[31mb\nc\rd\te\udcff\u202e") == r"a\x1b[31mb\nc\rd\te\udcff\u202e"


def test_a_console_prints_brackets_and_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console = console_for(None)
    console.print("model: [/]run/[bold]x :smile:\x1b[2J\udcff\nnext", soft_wrap=True)
    assert capsys.readouterr().out == "model: [/]run/[bold]x :smile:\\x1b[2J\\udcff\nnext\n"
    table = Table()
    table.add_column("[/]a")
    table.add_row("[/b]\x1b[2J")
    table.add_row(Text("\x07\x1b[3J"))
    console.print(table)
    shown = capsys.readouterr().out
    assert "[/]a" in shown
    assert r"[/b]\x1" in shown  # cut at the width of the cell
    assert r"\x1b[3J" in shown
    assert "\x1b" not in shown


def test_a_progress_bar_takes_names_with_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the output for a terminal
    console = console_for(None)
    with progress_bars(console) as report, console.capture() as captured:
        report("[/]run", 1, 2)
        console.print("line")
    assert "line" in captured.get()


def test_long_work_without_a_terminal_prints_a_few_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 0.0, 10.0, 40.0, 50.0, 80.0])  # the first report reads the clock twice
    with progress_bars(console_for(None), clock=lambda: next(times)) as report:
        for done, total in ((10, 90), (20, 90), (50, 90), (60, 90), (90, None)):
            report("[b]clip.mp4", done, total)
    assert capsys.readouterr().out == "[b]clip.mp4: 50 of 90, 1.0 per second\n[b]clip.mp4: 90, 1.0 per second\n"


def test_an_error_message_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(commands.bad_name, ["recipes"]) == 2
    assert capsys.readouterr().err == "caaseg: a\\nb\\x1b[2J.png: no such file\n"


def report_a_run(show: Callable[[str, Progress], None]) -> Iterator[None]:
    """Report 40 steps with a validation after step 20; yields after each report."""
    for step in (10, 20, 30, 40):
        state = Progress(step, 40, 0.51234, 8.04, seconds_left=61.2, mean_iou=None)
        show("training", state)
        yield
        if step == 20:
            show("training", state._replace(mean_iou=0.4321, is_validation=True))


def test_without_a_terminal_training_prints_a_line_every_five_seconds_and_one_per_validation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = 100.0
    with training_progress(console_for(None), clock=lambda: seconds) as show:
        for _ in report_a_run(show):
            seconds += 3
    assert capsys.readouterr().out.splitlines() == [
        "training: step 10 of 40, loss 0.512, 8.0 images/s, 0:01:01 left",
        "training: step 20 of 40: validation, mean IoU 43.2",
        "training: step 30 of 40, loss 0.512, 8.0 images/s, 0:01:01 left",
    ]


def test_in_a_terminal_each_validation_prints_a_line_above_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the output for a terminal
    console = console_for(None)
    with training_progress(console) as show, console.capture() as captured:
        list(report_a_run(show))
    shown = captured.get()
    assert "training: step 20 of 40: validation, mean IoU 43.2\n" in shown
    assert "left\n" not in shown
