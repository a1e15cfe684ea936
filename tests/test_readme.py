"""Every example of the README runs, word for word."""

import re
import shlex
from pathlib import Path

import pytest

from caaseg.cli import main
from tests.evaluation.test_conflicts import few_scenes as few_scenes
from tests.evaluation.test_conflicts import saved
from tests.training.test_runs import images_and_masks

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YOUR_OWN = re.search(r"^## Your own images\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    return re.findall(r"^caaseg (.*)$", "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)), re.MULTILINE)


assert YOUR_OWN is not None
FOLDER_COMMANDS = commands(YOUR_OWN[1])
STUDIES = [command for command in commands(README) if command.split()[0] in ("conflicts", "compare")]
COMMANDS = [command for command in commands(README) if command not in [*FOLDER_COMMANDS, *STUDIES]]


def test_the_readme_has_its_examples() -> None:
    assert len(SNIPPETS) == 5
    assert {shlex.split(command)[0] for command in COMMANDS} == {"flops", "demo", "data"}
    assert [shlex.split(command)[0] for command in FOLDER_COMMANDS] == ["data", "train", "evaluate"]
    assert [shlex.split(command)[0] for command in STUDIES] == ["conflicts", "compare"]


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


@pytest.mark.usefixtures("few_scenes")
def test_attentions_and_models_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for head in ("danet", "caa"):
        saved(head, tmp_path / f"my-{head}")
    for command in STUDIES:
        assert main(shlex.split(command)) == 0, command
    assert (tmp_path / "conflicts" / "conflicts.html").is_file()
    assert (tmp_path / "compared.png").is_file()


def test_a_folder_of_six_images_is_trained_on_and_scored_by_the_words_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images_and_masks(tmp_path / "my-data", number=6)  # where the section says that they are to be
    for command in FOLDER_COMMANDS:
        assert main(shlex.split(command)) == 0, command
    said = capsys.readouterr().out
    assert "your own images and masks (folder, 2 classes), val: 1 images" in said
    assert "mean IoU " in said
    assert (tmp_path / "my-run" / "model" / "model.safetensors").is_file()


def test_the_figure_is_there() -> None:
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (Path(__file__).parents[1] / image).is_file()
