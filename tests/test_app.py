"""The app of `caaseg app` without a browser: photos, predictions, attention, files to save and error messages."""

import io
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from caaseg.cli import main
from caaseg.errors import CaasegError
from caaseg.files import lock_name
from caaseg.models.heads.base import Head
from caaseg.models.heads.fcn import FCNHead
from caaseg.models.loading import load_model
from caaseg.models.segmenter import Segmenter
from tests import processes
from tests.small_models import scenes_model, small_model, varied_model

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from starlette.testclient import TestClient

from caaseg.app import samples, server
from caaseg.app.photos import MissingPhotoError, Photos, upload_directory
from caaseg.app.predictions import AppModel, Predictions
from caaseg.app.protection import KnownHosts

Open = Callable[..., TestClient]


@pytest.fixture(scope="module")
def model() -> Segmenter:
    return varied_model(license="CC0-1.0")


@pytest.fixture
def open_app(tmp_path: Path) -> Iterator[Open]:
    opened: list[server.App] = []

    def open_models(*models: Segmenter) -> TestClient:
        named = [AppModel(f"model {k}", model) for k, model in enumerate(models)]
        opened.append(server.App(named, tmp_path))
        return TestClient(opened[-1].asgi(["testserver"]))

    yield open_models
    for app in opened:
        app.worker.shutdown()


def photo_bytes(height: int = 60, width: int = 90, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def add(client: TestClient, content: bytes, name: str = "street.png") -> dict[str, Any]:
    answer = client.post("/api/photos", params={"name": name}, content=content)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_the_app_opens_on_the_sample_photo_with_its_attribution_and_the_license_of_the_model(
    open_app: Open, model: Segmenter
) -> None:
    client = open_app(model)
    page = client.get("/").text
    assert "/page/app.js" in page
    assert client.get("/page/app.js").status_code == 200
    about = client.get("/api/page").json()
    assert (about["photo"]["name"], about["photo"]["width"], about["photo"]["height"]) == (
        "summer-palace.jpg",
        640,
        427,
    )
    assert "danielbuechele, CC BY 2.0" in about["attribution"]
    assert about["models"][0]["license"] == "CC0-1.0"
    assert about["models"][0]["classes"] == [f"class {k}" for k in range(6)]  # saved without names
    view = Image.open(io.BytesIO(client.get(f"/api/photos/{about['photo']['id']}/view.jpg").content))
    assert view.size == (640, 427)
    assert client.delete(f"/api/photos/{about['photo']['id']}").status_code == 204  # it stays, for other sessions
    assert client.get(f"/api/photos/{about['photo']['id']}/view.jpg").status_code == 200


def test_models_of_synthetic_scenes_open_on_a_scene(open_app: Open) -> None:
    about = open_app(scenes_model()).get("/api/page").json()
    assert about["photo"]["name"] == "scene.png"
    assert about["attribution"].startswith("A synthetic scene")


@pytest.mark.parametrize("size", ["auto", "native", "40"])
def test_predictions_are_those_of_the_library(open_app: Open, model: Segmenter, tmp_path: Path, size: str) -> None:
    content = photo_bytes()
    (tmp_path / "street.png").write_bytes(content)
    expected = model.predict(tmp_path / "street.png", size=int(size) if size.isdigit() else size)
    client = open_app(model)
    address = f"/api/photos/{add(client, content)['id']}/models/0"
    found = client.get(address, params={"size": size}).json()
    shares = {f"class {k}": share for k, share in enumerate(found["shares"]) if share}
    assert shares == {f"class {name}": share for name, share in expected.shares.items()}
    assert found["predicted_size"] == ([40, 60] if size == "40" else [60, 90])
    answer = client.get(f"{address}/view", params={"size": size})  # the client decompresses it
    assert (np.frombuffer(answer.content, np.uint8).reshape(60, 90) == expected.labels).all()


def test_files_to_save(open_app: Open, model: Segmenter) -> None:
    client, content = open_app(model), photo_bytes()
    address = f"/api/photos/{add(client, content)['id']}/models/0"
    image = np.asarray(Image.open(io.BytesIO(content)))
    expected = model.predict(image)

    def saved(file: str, **values: Any) -> bytes:
        answer = client.get(f"{address}/{file}", params=values)
        stem, _, suffix = file.partition(".")
        assert answer.headers["content-disposition"] == f'attachment; filename="street_{stem}.{suffix}"'
        return answer.content

    labels = Image.open(io.BytesIO(saved("labels.png")))
    assert labels.mode == "P"
    assert (np.asarray(labels) == expected.labels).all()
    with zipfile.ZipFile(io.BytesIO(saved("masks.zip"))) as archive:
        masks = {name: np.asarray(Image.open(archive.open(name))) for name in archive.namelist()}
    present = np.unique(expected.labels)
    assert sorted(masks) == [f"{k:03}_class_{k}.png" for k in present]
    for k in present:
        assert ((masks[f"{k:03}_class_{k}.png"] == 255) == (expected.labels == k)).all()
    hidden = int(present[0])
    drawn = np.asarray(Image.open(io.BytesIO(saved("overlay.jpg", opacity=100, hidden=hidden)))).astype(int)
    is_hidden = (expected.labels == hidden)[..., None]
    ideal = np.where(is_hidden, image, np.array(expected.palette)[expected.labels])
    assert np.abs(drawn - ideal).mean() < 12  # JPEG of noise
    picture = Image.open(io.BytesIO(saved("attention.png", row=10, column=20)))
    assert picture.width == 2 * picture.height * 90 // 60


def test_a_pixel_has_its_attention_and_the_places_it_attends_to(open_app: Open, model: Segmenter) -> None:
    client = open_app(model)
    address = f"/api/photos/{add(client, photo_bytes())['id']}/models/0/pixel"
    found = client.get(address, params={"row": 59, "column": 0}).json()
    attention = found["attention"]
    rows, columns = attention["cells"]
    assert attention["cell"] == [rows - 1, 0]
    assert (len(attention["column"]), len(attention["row"]), len(attention["reach"])) == (rows, columns, rows * columns)
    assert sum(attention["reach"]) == pytest.approx(1, abs=1e-5)
    assert 1 <= len(attention["places"]) <= 3
    assert attention["own_weight"] + sum(place["weight"] for place in attention["places"]) <= 1 + 1e-5
    assert sum(entry["weight"] for entry in attention["by_class"]) <= 1 + 1e-5
    assert attention["gates"]["number"] == 16
    answer = client.get(address, params={"row": 60, "column": 0})
    assert (answer.status_code, answer.json()["message"]) == (422, "row 60 is outside the image; expected 0 to 59")


class HeadWithoutAttention(FCNHead):
    """A custom head that does not describe its attention."""

    without_attention = Head.without_attention


@pytest.mark.parametrize(
    ("head", "has_lines", "has_gates", "reason"),
    [
        ("axial_se", True, False, ""),
        ("channelized_self_attention", False, True, ""),
        ("fcn", False, False, "An FCN head has no attention."),
        ("danet", False, False, "A DANet head has no attention along columns and rows."),
        (HeadWithoutAttention, False, False, "This head has no attention that can be shown per pixel."),
    ],
)
def test_a_head_shows_lines_and_gates_only_if_it_has_them(
    open_app: Open, head: str | type[Head], has_lines: bool, has_gates: bool, reason: str
) -> None:
    client = open_app(small_model(head, output_stride=8).eval())
    address = f"/api/photos/{add(client, photo_bytes())['id']}/models/0"
    found = client.get(f"{address}/pixel", params={"row": 5, "column": 5}).json()
    assert found["reason"].startswith(reason)
    assert (found["attention"] is None) == bool(reason)
    if found["attention"] is None:
        answer = client.get(f"{address}/attention.png", params={"row": 5, "column": 5})
        assert (answer.status_code, answer.json()["message"]) == (422, found["reason"])
    else:
        assert (found["attention"]["column"] is not None, found["attention"]["gates"] is not None) == (
            has_lines,
            has_gates,
        )


def test_a_file_that_is_not_an_image_gets_a_message_with_its_own_name(
    open_app: Open, model: Segmenter, tmp_path: Path
) -> None:
    client = open_app(model)
    huge = io.BytesIO()
    Image.new("1", (9_940, 9_000)).save(huge, "PNG")
    for content, name, message in [
        (huge.getvalue(), "huge.png", "huge.png: 9940 x 9000 pixels; expected at most 89,000,000; resize or crop"),
        (b"no picture", "notes.txt", "notes.txt: not an image in any of JPEG, PNG"),
        (photo_bytes()[:300], "cut.png", "cut.png: cannot be read as an image"),
        (b"", "../../empty.png", "empty.png: not an image"),
    ]:
        answer = client.post("/api/photos", params={"name": name}, content=content)
        assert answer.status_code == 422
        assert answer.json()["message"].startswith(message)
    assert len(list(tmp_path.iterdir())) == 1  # the sample


def test_a_file_above_the_limit_gets_a_message(model: Segmenter, tmp_path: Path) -> None:
    app = server.App([AppModel("mine", model)], tmp_path, max_megabytes=1)
    with TestClient(app.asgi(["testserver"])) as client:
        answer = client.post("/api/photos", params={"name": "large.png"}, content=bytes(3 << 20))
    assert (answer.status_code, answer.json()["message"]) == (
        422,
        "large.png: 3 MB; expected at most 1; save it smaller",
    )
    assert len(list(tmp_path.iterdir())) == 1
    app.worker.shutdown()


def test_bad_values_in_requests_get_a_message(open_app: Open, model: Segmenter) -> None:
    client = open_app(model)
    photo = client.get("/api/page").json()["photo"]["id"]
    for address, message in [
        (f"{photo}/models/0?size=0", "size is '0'; expected auto, native, or a short side of 1 to 4096 pixels"),
        (f"{photo}/models/1", "there is no model 1; expected 0 to 0"),
        (f"{photo}/models/0/pixel?row=x&column=1", "row is 'x'; expected a number from 0 to 1048576"),
        (f"{photo}/models/0/overlay.jpg?opacity=101", "opacity is '101'; expected a number from 0 to 100"),
        ("gone/models/0", "The photo is no longer stored; add it again."),
    ]:
        answer = client.get(f"/api/photos/{address}")
        assert answer.status_code in (404, 422)
        assert answer.json() == {"message": message}


def test_the_least_recently_used_photo_is_deleted_first(tmp_path: Path) -> None:
    photos = Photos(tmp_path, max_photos=3)

    def stored(name: str, **options: bool) -> str:
        path = photos.new_path()
        path.write_bytes(photo_bytes(8, 8))
        return photos.add(path, name, **options).id

    pinned, first, second = stored("pinned", pinned=True), stored("first"), stored("second")
    photos.get(first)
    third = stored("third")
    assert {path.name for path in tmp_path.iterdir()} == {pinned, first, third}
    with pytest.raises(MissingPhotoError, match=r"The photo is no longer stored; add it again\."):
        photos.get(second)
    assert photos.remove(first)
    assert not photos.remove(pinned)


def test_predictions_above_the_memory_limit_are_computed_again(model: Segmenter, tmp_path: Path) -> None:
    photos, predictions = Photos(tmp_path), Predictions([AppModel("mine", model)], max_bytes=1)
    path = photos.new_path()
    path.write_bytes(photo_bytes())
    photo = photos.add(path, "street.png")
    first = predictions.get(photo, 0, "auto")
    assert predictions.get(photo, 0, "auto") is first
    predictions.get(photo, 0, 32)
    again = predictions.get(photo, 0, "auto")
    assert again is not first
    assert (again.labels == first.labels).all()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "testserver:80", "Origin": "http://testserver:80"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_requests_of_other_pages_are_refused(
    open_app: Open, model: Segmenter, headers: dict[str, str], status: int
) -> None:
    assert open_app(model).get("/api/page", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "nowhere: no such model; expected a run, a model directory, an .onnx file, hf://owner/name, or a shipped "
            "model: camvid",
        ),
        (["a", "b", "c"], "3 models are given; expected one, or two to compare"),
        (["a", "--port", "70000"], "--port is 70000; expected less than or equal to 65535"),
    ],
)
def test_bad_arguments_give_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", *arguments]) == 2
    assert capsys.readouterr().err == f"caaseg: {message}\n"


def test_without_the_extra_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "caaseg.app.server")
    assert main(["app"]) == 2
    expected = 'the app needs uvicorn, which is not installed; install it with: pip install "caaseg[app]"'
    assert capsys.readouterr().err == f"caaseg: {expected}\n"


def die_with_lock(directory: Path, name: str) -> None:
    with lock_name(directory, name, wait=True):
        os.kill(os.getpid(), signal.SIGKILL)


def test_uploads_of_killed_apps_are_deleted_and_those_of_running_apps_are_not(tmp_path: Path) -> None:
    parent = tmp_path / "new" / "uploads"
    with upload_directory(parent) as running:
        (running / "mine.png").write_bytes(b"mine")
        (parent / "killed").mkdir()
        (parent / "killed" / "private.png").write_bytes(b"private")
        assert processes.run(die_with_lock, parent, "killed") == -signal.SIGKILL
        with upload_directory(parent) as other:
            directories = sorted(path for path in parent.iterdir() if path.is_dir())
            assert directories == sorted([running, other])
        assert (running / "mine.png").read_bytes() == b"mine"
    assert list(parent.iterdir()) == []


def test_a_directory_for_uploads_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CaasegError, match="belongs to another user"), upload_directory(tmp_path):
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
    async def app(*_: Any) -> None: ...

    assert KnownHosts(app, names=["localhost", "Box.lan"]).is_known(header) == is_known


def predicted_by_command(model: str, photos: list[Path], out: Path) -> list[NDArray[np.uint8]]:
    assert main(["predict", model, *map(str, photos), "--out", str(out), "--device", "cpu"]) == 0
    return [np.asarray(Image.open(out / "labels" / f"{photo.stem}.png")) for photo in photos]


@pytest.mark.slow
def test_app_command_and_library_give_identical_labels_for_20_photos(open_app: Open, tmp_path: Path) -> None:
    small = varied_model(short_sides=(48, 64, 80))
    small.save_pretrained(tmp_path / "small")
    sizes = [(9, 14), (30, 20), (48, 48), (64, 97), (80, 200), (81, 120), (150, 90), (200, 333), (333, 500), (700, 900)]
    drawn = [tmp_path / f"drawn{k}.{'png' if k % 2 else 'jpg'}" for k in range(len(sizes))]
    for (height, width), path in zip(sizes, drawn, strict=True):
        path.write_bytes(photo_bytes(height, width, "PNG" if path.suffix == ".png" else "JPEG"))
    real = sorted((Path(__file__).parents[2] / "shared" / "data" / "camvid" / "test").glob("*.jpg"))[::30][:5]
    with Image.open(samples.SAMPLE) as sample:
        resized = [
            sample.resize((width, round(0.67 * width)))
            for width in np.linspace(200, 2500, 10 - len(real)).astype(int).tolist()
        ]
    for k, image in enumerate(resized):
        image.save(tmp_path / f"sample{k}.jpg")
    photographs = [
        *(Path(shutil.copy(photo, tmp_path)) for photo in real),
        *(tmp_path / f"sample{k}.jpg" for k in range(len(resized))),
    ]
    camvid = load_model("camvid")
    assert isinstance(camvid, Segmenter)
    client = open_app(small, camvid)
    for number, (model, name, photos) in enumerate(
        [(small, str(tmp_path / "small"), drawn), (camvid, "camvid", photographs)]
    ):
        assert len(photos) == 10
        by_command = predicted_by_command(name, photos, tmp_path / f"predictions{number}")
        for photo, expected in zip(photos, by_command, strict=True):
            by_library = model.predict(photo).labels
            address = f"/api/photos/{add(client, photo.read_bytes(), photo.name)['id']}/models/{number}/labels.png"
            by_app = np.asarray(Image.open(io.BytesIO(client.get(address).content)))
            assert (by_app == by_library).all(), photo
            assert (by_app == expected).all(), photo
