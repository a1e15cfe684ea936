"""A run resumes only with the data, the model and the optimizer of its checkpoint."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.recipes import load_recipe
from caaseg.training.run import train
from tests.training.small import SMALL_ARGUMENTS, images_and_masks

FIRST = "checkpoints/step-00000001.pt"


def recipe(root: Path, *arguments: str) -> Recipe:
    short = ["--steps", "2", "--validate_every", "2", "--checkpoint_every", "1", "--model.head", "fcn"]
    crop = ["--data.crop", "48", "48", "--data.root", str(root / "data")]
    return load_recipe("folder/caa_resnet18", [*SMALL_ARGUMENTS, *short, *crop, *arguments])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a dataset and a run that has only the checkpoint of the first of its two steps."""
    root = tmp_path_factory.mktemp("stopped")
    images_and_masks(root / "data")
    (root / "data" / "classes.yaml").write_text("classes: [wall, door]\n")
    (root / "data" / "train.txt").write_text("0\n1\n2\n3\n")
    (root / "data" / "val.txt").write_text("4\n5\n")
    train(recipe(root), root / "run", device="cpu")
    (root / "run" / "checkpoints" / "step-00000002.pt").unlink()
    return root


@pytest.fixture
def root(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_refused(root: Path, message: str, *arguments: str, out: str = "run", resume: str | Path = "auto") -> None:
    before = contents(root)
    with pytest.raises(CaasegError, match=message):
        # bad_files may change on resume: a run that is not refused would save the new value.
        train(recipe(root, "--data.bad_files", "skip", *arguments), root / out, device="cpu", resume=resume)
    assert contents(root) == before


def write(path: str, text: str) -> Callable[[Path], object]:
    return lambda data: (data / path).write_text(text)


def rename(data: Path) -> None:
    for path in (data / "images" / "3.jpg", data / "masks" / "3.png"):
        path.rename(path.with_stem("7"))
    (data / "train.txt").write_text("0\n1\n2\n7\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            write("classes.yaml", "classes: [door, wall]"),
            "split train have changed: the classes were wall, door and are",
        ),
        (write("train.txt", "0\n1\n3\n"), "split train have changed: missing 2; restore them, or start a new run"),
        (write("val.txt", "5\n"), "split val have changed: missing 4; restore"),
        (rename, "split train have changed: missing 3; new 7; restore"),
        (write("train.txt", "1\n0\n2\n3\n"), "split train have changed: the images are in another order"),
    ],
)
def test_changed_data_are_refused_and_no_file_is_changed(
    root: Path, change: Callable[[Path], object], message: str
) -> None:
    change(root / "data")
    assert_refused(root, message)


def test_a_repaired_image_is_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = root / "data" / "images" / "2.jpg"
    Image.open(path).save(path, quality=30)
    with caplog.at_level(logging.WARNING):
        assert train(recipe(root), root / "run", device="cpu", resume="auto").finished
    assert "step-00000001.pt: files of split train have changed their size: 2" in caplog.text


def test_a_checkpoint_of_an_earlier_version_resumes(root: Path) -> None:
    state = torch.load(root / "run" / FIRST, weights_only=True)
    del state["data"], state["config"]
    torch.save(state, root / "run" / FIRST)
    assert train(recipe(root), root / "run", device="cpu", resume="auto").finished


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model.head", "axial"),
            "its weights do not fit, because it has head fcn instead of axial",
        ),
        (("--model.channels", "8"), "because it has channels 16 instead of 8; set the same values with --model.NAME"),
        (("--optimizer.name", "sgd"), "its optimizer is adamw, but optimizer.name is sgd; use the same"),
        (("--optimizer.name", "adam"), "its optimizer is adamw, but optimizer.name is adam; use the same"),
        (("--optimizer.ema", "none"), "has EMA weights, but optimizer.ema is None; use the same setting"),
    ],
)
def test_the_checkpoint_of_another_network_or_optimizer_is_refused(
    root: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert_refused(root, message, *arguments, out="new", resume=root / "run" / FIRST)
    assert not (root / "new").exists()


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_a_checkpoint_of_the_same_optimizer_resumes(root: Path, name: str) -> None:
    settings = recipe(root, "--optimizer.name", name)
    train(settings, root / "other", device="cpu")
    (root / "other" / "checkpoints" / "step-00000002.pt").unlink()
    assert train(settings, root / "other", device="cpu", resume="auto").finished


@pytest.mark.parametrize("change", [{"step": "1"}, {"best": None}, {"model": {"weight": 1}}, {"optimizer": {}}])
def test_a_checkpoint_with_invalid_content_is_refused(root: Path, change: dict[str, object]) -> None:
    state = torch.load(root / "run" / FIRST, weights_only=True) | change
    torch.save(state, root / "run" / FIRST)
    assert_refused(
        root,
        r"step-00000001\.pt: (not a complete checkpoint|the state of its optimizer does not)",
        resume=root / "run" / FIRST,
    )
