"""Every example of the README runs as it is written, and every number in it is that of a committed result."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

import caaseg
from caaseg.cli import main, parse
from tests.data.trees import CAMVID
from tests.page_numbers import check_every_number, prose
from tests.reader_files import sample_photo
from tests.training.camvid_frames import save_frames

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YOUR_OWN = re.search(r"^## Your own images\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
SOURCES = yaml.safe_load((ROOT / "docs" / "readme_numbers.yaml").read_text())


def blocks(text: str) -> list[list[str]]:
    """Return the commands of each block of commands."""
    found = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [re.findall(r"^caaseg (.*)$", block, re.MULTILINE) for block in found]


assert YOUR_OWN is not None
[FOLDER_COMMANDS] = blocks(YOUR_OWN[1])
BLOCKS = [block for block in blocks(README) if block and block != FOLDER_COMMANDS]


def test_the_readme_is_short_and_has_its_examples() -> None:
    assert len(README.splitlines()) <= 150
    assert len(SNIPPETS) == 2
    assert [shlex.split(command)[0] for block in BLOCKS for command in block] == ["predict"]
    assert [shlex.split(command)[0] for command in FOLDER_COMMANDS] == ["data", "train", "evaluate", "predict"]
    for command in ("./run demo", "./run test"):
        assert f"\n{command} " in README


def test_every_number_is_that_of_a_result() -> None:
    check_every_number(prose(README), SOURCES)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python_examples_run_and_their_shapes_are_right(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample_photo()
    names: dict[str, object] = {}
    exec(snippet, names)
    checked = 0
    for expression, shape in re.findall(r"^([\w.]+)(?: = .*?)?\s+# (\([\d, ]+\))", snippet, re.MULTILINE):
        value = eval(expression, names)
        assert tuple(getattr(value, "shape", value)) == eval(shape), expression
        checked += 1
    assert checked


@pytest.mark.parametrize("command", [command for block in blocks(README) for command in block])
def test_a_command_and_its_options_exist(command: str) -> None:
    arguments = shlex.split(command, comments=True)
    function, options = parse(arguments)  # raises if the command or one of its options does not exist
    assert function.__name__ == "_".join(arguments[:2] if arguments[0] in ("data", "benchmark") else arguments[:1])
    if options.get("recipe"):
        assert caaseg.load_recipe(options["recipe"], options["overrides"]).steps > 0


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0].split()[0])
def test_commands_run(block: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sample_photo()
    for command in block:
        assert main(shlex.split(command, comments=True)) == 0


@pytest.mark.slow
@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")
def test_twenty_photos_of_your_own_give_a_model_much_better_than_from_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section's commands on frames with four new classes. Both models are scored on other frames."""
    monkeypatch.chdir(tmp_path)
    for directory, first in (("my-data", 0), ("others", 4)):
        save_frames(Path(directory), first)
    for directory in ("my-data", "others"):
        assert main(["data", "init", directory]) == 0
    cpu_times = []
    for command in FOLDER_COMMANDS:
        start = cpu_time()
        assert main(shlex.split(command)) == 0, command
        cpu_times.append(cpu_time() - start)
    assert max(cpu_times) < 2 * 4 * 60  # 4 minutes on 2 cores
    assert len(list((tmp_path / "predictions/overlays").iterdir())) == 20
    [training] = [command for command in FOLDER_COMMANDS if command.startswith("train")]
    arguments = [*shlex.split(training.replace("my-run", "random-run")), "--init-from", "none"]
    assert main(arguments) == 0
    scores = {}
    for run in ("my-run", "random-run"):
        arguments = ["--dataset", "folder", "--root", "others", "--split", "train+val", "--json", f"{run}.json"]
        assert main(["evaluate", run, *arguments]) == 0
        scores[run] = json.loads(Path(f"{run}.json").read_text())["mean_iou"]
    assert scores["my-run"] > 0.45
    assert scores["my-run"] > scores["random-run"] + 0.1


def cpu_time() -> float:
    """Return the CPU time of this process and its finished children, in seconds."""
    times = os.times()
    return sum(times[:4])


def test_the_images_exist() -> None:
    images = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert images
    for image in images:
        assert (ROOT / image).is_file()
