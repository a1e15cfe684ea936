"""The output directory of predictions: other files are never touched, results know their origin, damage is repaired."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor, nn

from caaseg.data.inputs import InputImage
from caaseg.data.labels import distinct_colors
from caaseg.errors import CaasegError
from caaseg.models.inference import LoadedModel
from caaseg.prediction_directory import Metadata, output_paths
from caaseg.predictions import ImageOutcome, PredictOptions, PredictTask, predict_images

X, Y = (InputImage(Path(f"{name}.png"), Path(name)) for name in "xy")


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, color in (("x", "red"), ("y", "blue")):
        Image.new("RGB", (12, 8), color).save(f"{name}.png")
    return tmp_path


class Network(nn.Module):
    """Returns its input as logits of three classes, after calling a function."""

    def __init__(self, call: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.call = call

    def forward(self, images: Tensor) -> Tensor:
        self.call()
        return images


def task(
    network: nn.Module | None = None, *, digest: str = "a1", flip: bool = False, probabilities: bool = False
) -> PredictTask:
    model = LoadedModel(network or Network(), 3, None, distinct_colors(3), digest, "runs/one")
    options = PredictOptions(flip=flip)
    return PredictTask(model=model, options=options, out=Path("out"), probabilities=probabilities)


def predict(name: str, *, probabilities: bool = False) -> ImageOutcome:
    (outcome,) = predict_images(task(probabilities=probabilities), [InputImage(Path(f"{name}.png"), Path(name))])
    assert outcome.message is None
    return outcome


def contents(directory: Path) -> dict[str, str | bytes]:
    """Return every file with its bytes, and every link with its target."""
    return {
        str(path): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def write(path: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("mine")
    return Path(path)


def link(path: str, target: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).symlink_to(Path(target).absolute())
    return Path(path)


def link_labels() -> None:
    write("elsewhere/x.png")
    link("out/labels", "elsewhere")


def replace_labels_by_link() -> None:
    predict("x")
    write("elsewhere/x.png")
    shutil.rmtree("out/labels")
    link("out/labels", "elsewhere")


def replace_result_by_link() -> None:
    predict("x")
    write("precious.png")
    Path("out/labels/x.png").unlink()
    link("out/labels/x.png", "precious.png")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda: write("out/labels/x.png"), "out/labels: has files, and caaseg predict did not write them"),
        (lambda: write("out/labels/other.png"), "out/labels: has files, and caaseg predict did not write them"),
        (lambda: write("out/metadata/x.json"), "out/metadata: has files, and caaseg predict did not write them"),
        (lambda: (predict("y"), write("out/labels/x.png")), "out/labels/x.png: exists, and caaseg predict did not"),
        (lambda: (predict("y"), write("out/overlays/x.jpg")), "out/overlays/x.jpg: exists, and caaseg predict did not"),
        (lambda: (predict("y"), write("out/probabilities/x.npy")), "out/probabilities/x.npy: exists, and caaseg"),
        (lambda: (predict("y"), write("out/metadata/x.json")), "out/metadata/x.json: cannot be read as JSON"),
        (lambda: (predict("y"), link("out/overlays/x.jpg", "gone")), "out/overlays/x.jpg: a symbolic link, and caaseg"),
        (link_labels, "out/labels: "),
        (replace_labels_by_link, "out/labels: a symbolic link, and caaseg predict writes below --out only"),
        (replace_result_by_link, "out/labels/x.png: a symbolic link, and caaseg predict writes below --out only"),
        (lambda: write("out/predict.json"), "out/predict.json: cannot be read as JSON"),
        (lambda: link("out/predict.json", "gone"), "out/predict.json: a symbolic link"),
    ],
)
def test_files_of_the_user_are_an_error_before_any_work(prepare: Callable[[], object], message: str, cwd: Path) -> None:
    prepare()
    before = contents(cwd)
    unused = Network(lambda: pytest.fail("the model ran"))
    with pytest.raises(CaasegError) as error:
        predict_images(task(unused), [InputImage(Path("y.png"), Path("new")), X])
    assert str(error.value).startswith(message)
    assert contents(cwd) == before


def test_metadata_cannot_name_files_elsewhere(cwd: Path) -> None:
    predict("x")
    write("precious.txt")
    path = Path("out/metadata/x.json")
    content = json.loads(path.read_text())
    content["results"]["../precious.txt"] = None
    path.write_text(json.dumps(content))
    Path("out/labels/x.png").write_bytes(b"")
    assert not predict("x").already_done
    assert Path("precious.txt").read_text() == "mine"


@pytest.mark.parametrize("damage", [b"", b"PNG", None], ids=["empty", "other", "deleted"])
@pytest.mark.parametrize("result", ["labels/x.png", "overlays/x.jpg", "probabilities/x.npy"])
def test_a_damaged_result_is_predicted_again(result: str, damage: bytes | None, cwd: Path) -> None:
    predict("x", probabilities=True)
    before = contents(cwd)
    path = Path("out", result)
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    assert not predict("x", probabilities=True).already_done
    assert contents(cwd) == before
    assert predict("x", probabilities=True).already_done


def test_a_label_file_cut_at_its_end_is_predicted_again(cwd: Path) -> None:
    predict("x")
    path = Path("out/labels/x.png")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])  # its pixels and its text can still be read
    assert not predict("x").already_done
    assert path.read_bytes() == whole


def test_an_image_with_other_content_but_the_same_time_and_size_is_predicted_again(cwd: Path) -> None:
    for name, level in (("x", 10), ("new", 200)):
        Image.new("RGB", (12, 8), (level, 20, 30)).save(f"{name}.bmp")
    image = [InputImage(Path("x.bmp"), Path("x"))]
    predict_images(task(), image)
    assert Path("x.bmp").stat().st_size == Path("new.bmp").stat().st_size
    shutil.copystat("x.bmp", "new.bmp")
    Path("new.bmp").replace("x.bmp")
    (outcome,) = predict_images(task(), image)
    assert not outcome.already_done


def test_metadata_has_paths_and_hashes_of_the_image_the_model_and_the_results(cwd: Path) -> None:
    predict("x")
    origin = {
        "image": "x.png",
        "image_sha256": hashlib.sha256(Path("x.png").read_bytes()).hexdigest(),
        "model": "runs/one",
        "model_sha256": "a1",
    }
    content = json.loads(Path("out/metadata/x.json").read_text())
    assert origin.items() <= content.items()
    assert content["results"] == {
        name: hashlib.sha256(Path("out", name).read_bytes()).hexdigest() for name in ("labels/x.png", "overlays/x.jpg")
    }
    with Image.open("out/labels/x.png") as labels:
        assert json.loads(labels.info["caaseg"]) == origin


def test_results_of_a_killed_process_are_its_own(cwd: Path) -> None:
    directory = task().directory()
    directory.open([X.name])
    paths = output_paths(X.name)
    started = {str(path): None for path in (paths.labels, paths.overlays[0], paths.probabilities)}
    metadata = Metadata(image="x.png", image_sha256="", model="", model_sha256="", results=dict(started))
    directory.begin(X.name, metadata)
    for path in started:
        write(f"out/{path}")  # killed before it wrote the metadata of the finished results
    assert not predict("x").already_done
    assert not Path("out/probabilities/x.npy").exists()
    assert predict("x").already_done


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"digest": "b2"}, 'out: has predictions with model_sha256 "a1", not "b2"; use another --out'),
        ({"flip": True}, "out: has predictions with flip false, not true; use another --out"),
    ],
)
def test_a_process_with_another_model_or_options_is_refused_during_the_first_image(
    other: dict[str, str | bool], message: str, cwd: Path
) -> None:
    messages = []

    def start_other() -> None:
        with pytest.raises(CaasegError) as error:
            predict_images(task(**other), [Y])  # type: ignore[arg-type]
        messages.append(str(error.value))

    (outcome,) = predict_images(task(Network(start_other)), [X])
    assert outcome.message is None
    assert len(messages) == 1
    assert messages[0].startswith(message)
    assert json.loads(Path("out/metadata/x.json").read_text())["model_sha256"] == "a1"


def test_of_two_processes_that_open_a_directory_only_the_last_writes_results(cwd: Path) -> None:
    first = task().directory()
    first.open([X.name])
    predict_images(task(digest="b2"), [Y])
    before = contents(cwd)
    with pytest.raises(CaasegError, match='out: has predictions with model_sha256 "b2", not "a1"'):
        first.begin(X.name, Metadata(image="", image_sha256="", model="", model_sha256="", results={}))
    assert contents(cwd) == before


def test_processes_with_the_same_model_and_options_share_a_directory(cwd: Path) -> None:
    others: list[ImageOutcome] = []

    def start_other() -> None:
        others.extend(predict_images(task(), [Y]))

    (outcome,) = predict_images(task(Network(start_other)), [X])
    assert [outcome.labels, others[0].labels] == ["out/labels/x.png", "out/labels/y.png"]
    assert len(list(Path("out/metadata").iterdir())) == 2
