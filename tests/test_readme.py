"""Every example of the README runs, word for word."""

import re
import shlex
from pathlib import Path

import pytest

from caaseg.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^caaseg (.*)$", "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)), re.MULTILINE)


def test_the_readme_has_its_examples() -> None:
    assert len(SNIPPETS) == 5
    assert {shlex.split(command)[0] for command in COMMANDS} == {"flops", "demo", "data"}


@pytest.mark.filterwarnings("ignore:my-model was learned on 3 classes")
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python_examples_run_and_their_shapes_are_right(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(snippet, names)
    checked = 0
    for expression, shape in re.findall(r"^([\w.]+)(?: = .*?)?\s+# (\([\d, ]+\))", snippet, re.MULTILINE):
        value = eval(expression, names)
        assert tuple(getattr(value, "shape", value)) == eval(shape), expression
        checked += 1
    assert checked or "save_pretrained" in snippet or "ChannelGate" in snippet


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "demo"])  # it has a test of its own
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command, comments=True)) == 0


def test_the_figure_is_there() -> None:
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (Path(__file__).parents[1] / image).is_file()
