"""The page of `caaseg app` without a browser: uploads, clicks, explanations and error messages."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.cli import main
from caaseg.data.datasets.scenes import FIRST_HOUSE, Scenes
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from caaseg.files import lock_name
from caaseg.models.heads.base import Head
from caaseg.models.heads.fcn import FCNHead
from tests import processes
from tests.small_models import scenes_model, small_model

app = pytest.importorskip("caaseg.app", reason="gradio is not installed", exc_type=ModuleNotFoundError)


def test_the_page_starts_with_a_drawn_scene_and_a_selected_house() -> None:
    models = [("mine", scenes_model())]
    shown, sentence = app.example(models)
    image, label, _ = Scenes("test")[app.EXAMPLE]
    assert (shown.image == image.permute(1, 2, 0).numpy()).all()
    assert FIRST_HOUSE <= label[shown.pixel] < len(Scenes.classes)
    assert sentence.endswith("in its row or column.")
    _, sentence = app.example([*models, ("other", small_model("fcn").eval())])
    assert sentence.endswith("Not every model here was trained on such scenes.")


def test_an_uploaded_image_is_shown_unchanged_unless_it_is_large(tmp_path: Path) -> None:
    models = [("mine", scenes_model())]
    pixels = np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "small.png")
    shown, sentence = app.uploaded(models, tmp_path / "small.png")
    assert (shown.image == pixels).all()
    assert (shown.pixel, sentence) == ((30, 45), "small.png, 90 x 60 pixels. Click a pixel.")

    Image.new("RGB", (1500, 600), (9, 99, 199)).save(tmp_path / "large.png")
    shown, sentence = app.uploaded(models, tmp_path / "large.png")
    assert shown.image.shape == (410, 1024, 3)
    assert sentence == "large.png, 1500 x 600 pixels, scaled down to 1024 x 410. Click a pixel."


def test_an_upload_that_is_no_image_or_too_large_is_refused_by_its_file_name(tmp_path: Path) -> None:
    models = [("mine", scenes_model())]
    (tmp_path / "notes.png").write_text("no picture")
    with pytest.raises(BadFileError, match=r"^notes\.png: not an image in any of JPEG, PNG"):
        app.uploaded(models, tmp_path / "notes.png")
    Image.new("1", (6000, 5000)).save(tmp_path / "huge.png")
    with pytest.raises(BadFileError, match=r"^huge\.png: 6000 x 5000 pixels; expected at most 25,000,000; resize"):
        app.uploaded(models, tmp_path / "huge.png")
    (tmp_path / "heavy.png").write_bytes(bytes(21 * 2**20))
    with pytest.raises(BadFileError, match=r"^heavy\.png: 21\.0 MB; expected at most 20; save it smaller"):
        app.uploaded(models, tmp_path / "heavy.png")


def test_a_click_selects_a_pixel_of_the_image_at_any_enlargement() -> None:
    shown, _ = app.example([("mine", scenes_model())])  # 128 x 128, drawn five times as large
    assert app.overlays([("mine", scenes_model())], shown, 60)[0].shape == (640, 640, 3)
    assert app.clicked(shown, 0, 0).pixel == (0, 0)
    assert app.clicked(shown, 14, 639).pixel == (127, 2)
    assert app.clicked(shown, 640, 640).pixel == (127, 127)  # a browser may round up


@pytest.mark.parametrize(
    ("head", "shows_lines", "shows_reach", "shows_gates", "words"),
    [
        ("caa", True, True, True, "along the column"),
        ("axial_se", True, True, False, "along the column"),
        ("channelized_self_attention", False, True, True, "the whole image at once"),
        ("fcn", False, False, False, "An FCN head has no attention."),
        ("danet", False, False, False, "A DANet head has no attention along columns and rows."),
    ],
)
def test_a_head_shows_lines_reach_and_gates_only_if_it_has_them(
    head: str, shows_lines: bool, shows_reach: bool, shows_gates: bool, words: str
) -> None:
    models = [("mine", small_model(head, output_stride=8).eval())]
    shown, _ = app.example(models)
    legend, note, lines, reach, gates = app.explanations(models, shown)
    assert "class " in legend  # saved without names
    assert words in note
    assert (lines.visible, reach.visible, gates.visible) == (shows_lines, shows_reach, shows_gates)


class HeadWithoutAttention(FCNHead):
    """A custom head that declares nothing about itself."""

    without_attention = Head.without_attention


def test_a_custom_head_without_attention_says_so() -> None:
    models = [("mine", small_model(HeadWithoutAttention).eval())]
    shown, _ = app.example(models)
    _, note, lines, reach, gates = app.explanations(models, shown)
    assert "None" not in note
    assert "This head has no attention that can be shown per pixel." in note
    assert (lines.visible, reach.visible, gates.visible) == (False, False, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "MODELS is missing; see caaseg app --help"),
        (
            ["nowhere"],
            "nowhere: no such model; expected a run, a model directory, an .onnx file, hf://owner/name, or a shipped "
            "model: camvid",
        ),
        (["a", "b", "c"], "3 models are given; expected one, or two to see side by side"),
        (["a", "--port", "70000"], "--port is 70000; expected less than or equal to 65535"),
    ],
)
def test_bad_arguments_give_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", *words]) == 2
    assert capsys.readouterr().err == f"caaseg: {message}\n"


def test_without_gradio_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "caaseg.app")
    assert main(["app", "my-model"]) == 2
    expected = 'the app needs gradio, which is not installed; install it with: pip install "caaseg[app]"'
    assert capsys.readouterr().err == f"caaseg: {expected}\n"


def die_with_lock(directory: Path, name: str) -> None:
    with lock_name(directory, name, wait=True):
        os.kill(os.getpid(), signal.SIGKILL)


def test_uploads_of_killed_apps_are_deleted_and_those_of_running_apps_are_not(tmp_path: Path) -> None:
    parent = tmp_path / "new" / "uploads"
    with app.upload_directory(parent) as running:
        (running / "mine.png").write_bytes(b"mine")
        (parent / "killed").mkdir()
        (parent / "killed" / "private.png").write_bytes(b"private")
        assert processes.run(die_with_lock, parent, "killed") == -signal.SIGKILL
        with app.upload_directory(parent) as other:
            directories = sorted(path for path in parent.iterdir() if path.is_dir())
            assert directories == sorted([running, other])
        assert (running / "mine.png").read_bytes() == b"mine"
    assert list(parent.iterdir()) == []


def test_a_directory_for_uploads_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CaasegError, match="belongs to another user"), app.upload_directory(tmp_path):
        pass


@pytest.mark.parametrize(
    ("header", "is_known"),
    [
        *[(header, True) for header in ("localhost", "LOCALHOST:7860", "127.0.0.1:80", "[::1]:7860", "[::1]")],
        *[(header, True) for header in ("box.lan:7860", "192.168.0.9:7860")],
        *[(header, False) for header in ("", "evil.example", "evil.example:7860", "127.0.0.1.evil.example", "box")],
        *[
            (header, False)
            for header in ("localhost.evil.example", "user@localhost", "localhost/", "localhost:x", "[]")
        ],
    ],
)
def test_only_known_hosts_are_served(header: str, is_known: bool) -> None:
    assert app.KnownHosts(lambda *_: None, names=["localhost", "Box.lan"]).is_known(header) == is_known


def test_the_running_app_refuses_unknown_hosts_and_looks_up_no_outside_name(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.app_requests"]  # gradio leaves sockets open: a process of its own
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["statuses"] == {"": 200, "localhost": 200, "evil.example": 403, "monitoring": 403}
    assert found["upload_succeeded"] is False
    assert found["looked_up"] == ["127.0.0.1"]
    assert list(tmp_path.glob("caaseg-app-*/*")) == []
