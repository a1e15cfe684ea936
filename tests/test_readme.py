"""Every example of the README runs as it is written. Commands that take long run in the slow tests."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

import caaseg
from caaseg.cli import main, parse
from tests.analysis.study_models import few_scenes as few_scenes
from tests.analysis.study_models import save_model
from tests.data.trees import CAMVID
from tests.training.camvid_frames import save_frames

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YOUR_OWN = re.search(r"^## Your own images\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[list[str]]:
    """Return the commands of each block of commands."""
    found = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [re.findall(r"^caaseg (.*)$", block, re.MULTILINE) for block in found]


assert YOUR_OWN is not None
[FOLDER_COMMANDS] = blocks(YOUR_OWN[1])
[STUDIES] = [block for block in blocks(README) if block and block[0].startswith("conflicts ")]
APART = (FOLDER_COMMANDS, STUDIES, ["demo"], ["app"])  # have their own tests
BLOCKS = [block for block in blocks(README) if block and block not in APART]
TAKE_LONG = ("export", "flops")


def test_the_readme_has_its_examples() -> None:
    assert len(SNIPPETS) == 5
    commands = {shlex.split(command)[0] for block in BLOCKS for command in block}
    assert commands == {"flops", "data", "predict", "export"}
    assert all(block in blocks(README) for block in APART)
    assert [shlex.split(command)[0] for command in FOLDER_COMMANDS] == ["data", "train", "evaluate", "predict"]
    assert [shlex.split(command)[0] for command in STUDIES] == ["conflicts", "compare"]


@pytest.mark.filterwarnings("ignore:my-model was trained on 3 classes")
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


@pytest.mark.parametrize("command", [command for block in blocks(README) for command in block])
def test_a_command_and_its_options_exist(command: str) -> None:
    words = shlex.split(command, comments=True)
    function, options = parse(words)  # raises if the command or one of its options does not exist
    assert function.__name__ == "_".join(words[:2] if words[0] in ("data", "benchmark") else words[:1])
    if options.get("recipe"):
        assert caaseg.load_recipe(options["recipe"], options["overrides"]).steps > 0


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=pytest.mark.slow if block[0].split()[0] in TAKE_LONG else ()) for block in BLOCKS],
    ids=lambda block: block[0].split()[0],
)
def test_commands_run(block: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a block run in order, in a directory with a model and photos."""
    monkeypatch.chdir(tmp_path)
    if any("my-model" in command for command in block):
        small = {"num_classes": 3, "channels": 16, "key_channels": 4, "gate_width": 8}
        caaseg.create_model("caa", backbone="test_efficientnet", **small).save_pretrained("my-model")  # type: ignore[arg-type]
        Path("photos").mkdir()
        Image.linear_gradient("L").resize((90, 70)).save("photos/a.jpg")
    for command in block:
        assert main(shlex.split(command, comments=True)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("few_scenes")
def test_conflicts_and_compare_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for head in ("danet", "caa"):
        save_model(head, tmp_path / f"my-{head}")
    for command in STUDIES:
        assert main(shlex.split(command)) == 0, command
    assert (tmp_path / "conflicts" / "conflicts.html").is_file()
    assert (tmp_path / "compared.png").is_file()


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
    words = [*shlex.split(training.replace("my-run", "random-run")), "--init-from", "none"]
    assert main(words) == 0
    scores = {}
    for run in ("my-run", "random-run"):
        words = ["--dataset", "folder", "--root", "others", "--split", "train+val", "--json", f"{run}.json"]
        assert main(["evaluate", run, *words]) == 0
        scores[run] = json.loads(Path(f"{run}.json").read_text())["mean_iou"]
    assert scores["my-run"] > 0.45
    assert scores["my-run"] > scores["random-run"] + 0.1


def cpu_time() -> float:
    """Return the CPU time of this process and its finished children, in seconds."""
    times = os.times()
    return sum(times[:4])


def test_the_images_exist() -> None:
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (Path(__file__).parents[1] / image).is_file()
