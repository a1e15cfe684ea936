"""The page of `caaseg app` but for the browser: what is taken, what is shown, what is refused."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.cli import main
from caaseg.data.datasets.scenes import FIRST_HOUSE, Scenes
from caaseg.data.sample import BadFileError
from caaseg.models.heads.base import Head
from caaseg.models.heads.fcn import FCNHead
from tests.small_models import scenes_model, small_model

app = pytest.importorskip("caaseg.app", reason="gradio is not installed", exc_type=ModuleNotFoundError)


def test_it_starts_with_a_drawn_scene_and_a_house_of_it() -> None:
    models = [("mine", scenes_model())]
    shown, told = app.example(models)
    image, label, _ = Scenes("test")[app.EXAMPLE]
    assert (shown.image == image.permute(1, 2, 0).numpy()).all()
    assert FIRST_HOUSE <= label[shown.pixel] < len(Scenes.classes)
    assert told.endswith("in its row or its column.")
    _, told = app.example([*models, ("other", small_model("fcn").eval())])
    assert told.endswith("Not every model here has learned such scenes.")


def test_an_image_is_taken_as_it_is_and_a_large_one_is_scaled_down(tmp_path: Path) -> None:
    models = [("mine", scenes_model())]
    pixels = np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "small.png")
    shown, told = app.uploaded(models, tmp_path / "small.png")
    assert (shown.image == pixels).all()
    assert (shown.pixel, told) == ((30, 45), "small.png, 90 x 60 pixels. Click a pixel.")

    Image.new("RGB", (1500, 600), (9, 99, 199)).save(tmp_path / "large.png")
    shown, told = app.uploaded(models, tmp_path / "large.png")
    assert shown.image.shape == (410, 1024, 3)
    assert told == "large.png, 1500 x 600 pixels, scaled down to 1024 x 410. Click a pixel."


def test_what_is_no_image_or_too_large_is_refused_by_its_own_name(tmp_path: Path) -> None:
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


def test_a_click_is_a_pixel_of_the_image_however_it_is_drawn() -> None:
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
def test_every_head_shows_what_it_has(
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
    ("words", "said"),
    [
        ([], "caaseg app needs MODELS; see caaseg app --help"),
        (["nowhere"], "nowhere: no such model; expected a run, a model directory, an .onnx file or hf://owner/name"),
        (["a", "b", "c"], "3 models are given; expected one, or two to see side by side"),
        (["a", "--port", "70000"], "--port is 70000; expected an integer from 1 to 65535, or none"),
    ],
)
def test_what_it_cannot_open_is_said_in_one_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["app", *words]) == 2
    assert capsys.readouterr().err == f"caaseg: {said}\n"


def test_without_gradio_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['gradio'] = None\nfrom caaseg.cli import main\nsys.exit(main(['app', 'my-model']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    expected = 'the app needs gradio, which is not installed; install it with: pip install "caaseg[app]"'
    assert ended.stderr == f"caaseg: {expected}\n"
