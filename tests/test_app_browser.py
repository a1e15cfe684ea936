"""The page of `caaseg app` in a browser, wide and narrow, without any other network access; and the app under load."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import caaseg
from caaseg.app.samples import SAMPLE
from tests.small_models import varied_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.slow

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
QUIET = ("--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update")
PATIENCE_MS = 30_000  # timeout on a busy machine; a passing test does not wait this long
CLASSES = ("thing", "stuff", "sky", "<b>bold</b>", "sea", "tree")

needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed")
widths = pytest.mark.parametrize("width", [1400, 400])


class Served(NamedTuple):
    """A running app with the models camvid and tiny."""

    address: str
    process: int
    tiny: caaseg.Segmenter


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("app")
    tiny = varied_model(classes=CLASSES, short_sides=(40, 60, 80))
    tiny.save_pretrained(directory / "tiny")
    temporary = directory / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "caaseg", "app", "camvid", "tiny", "--device", "cpu", "--no-browser"],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        found = re.match(r"page: (http://127\.0\.0\.1:\d+)/", lines.readline())
        assert found is not None
        try:
            yield Served(found[1], process.pid, tiny)
        finally:
            process.terminate()
            assert process.wait(30) == 0
    assert list(temporary.glob("caaseg-app-*/*")) == []


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox
        launched = driver.chromium.launch(executable_path=BROWSER, args=[*options, *QUIET])
        yield launched
        launched.close()


Open = Callable[[int], "Page"]


@pytest.fixture
def open_page(served: Served, browser: "Browser") -> Iterator[Open]:
    """Open the page with a window of a width, and wait for the sample photo. Nothing outside may be requested."""
    from playwright.sync_api import expect

    outside: list[str] = []
    errors: list[str] = []
    pages: list[Page] = []

    def only_here(route: "Route") -> None:
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    def open_with(width: int) -> "Page":
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route("**/*", only_here)
        page.goto(served.address)
        expect(page.locator("#facts")).to_contain_text("summer-palace.jpg, 640 x 427 pixels")
        expect(page.locator("#place-list li")).not_to_have_count(0)
        return page

    yield open_with
    for page in pages:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing to scroll sideways
        page.close()
    assert (outside, errors) == ([], [])


def overlay_pixels(page: "Page", model: int = 0) -> NDArray[np.uint8]:
    """Return the colors and alphas of the drawn classes, (H, W, 4)."""
    address: str = page.evaluate(f"document.getElementById('overlay-{model}').toDataURL()")
    return np.asarray(Image.open(io.BytesIO(b64decode(address.partition(",")[2]))).convert("RGBA"))


def save_photo(path: Path, height: int, width: int) -> Path:
    with Image.open(SAMPLE) as sample:
        sample.resize((width, height)).save(path)
    return path


def upload(page: "Page", *paths: Path) -> None:
    page.locator("#files").set_input_files(list(paths))


@needs_browser
@widths
def test_the_page_opens_on_the_sample_photo_with_classes_attention_and_licenses(open_page: Open, width: int) -> None:
    from playwright.sync_api import expect

    page, expected = open_page(width), caaseg.load_model("camvid").predict(SAMPLE)
    expect(page.locator("#facts")).to_contain_text("segmented at 540 x 360")
    expect(page.locator("#facts")).to_contain_text("“Summer Palace” by danielbuechele, CC BY 2.0")
    expect(page.locator("#footer")).to_contain_text("Model camvid: license CC-BY-NC-4.0.")
    names = page.locator("#list-0 .name").all_inner_texts()
    assert names == list(expected.shares)  # the largest first
    assert page.locator("#list-0 li").first.inner_text().split() == [
        names[0],
        f"{100 * expected.shares[names[0]]:.1f}",
        "%",
    ]
    drawn = overlay_pixels(page)
    assert (drawn[..., :3] == np.array(expected.palette, np.uint8)[expected.labels]).all()
    assert (drawn[..., 3] == 255).all()
    expect(page.locator("#selected")).to_contain_text(re.compile(r"Row 179, column 339: camvid:\s+Sky"))
    expect(page.locator(".place")).not_to_have_count(0)
    for place in page.locator(".place span").all_inner_texts():
        assert place in expected.classes
    assert page.locator("#gates .bars li").count() == 12
    stage, photo = page.locator("#attention").bounding_box(), page.locator("#classes").bounding_box()
    assert stage is not None
    assert photo is not None
    assert min(stage["width"], photo["width"]) > (550 if width == 1400 else 300)  # large enough to read


@needs_browser
@widths
def test_classes_are_switched_off_highlighted_faded_and_named_under_the_pointer(open_page: Open, width: int) -> None:
    from playwright.sync_api import expect

    page, labels = open_page(width), caaseg.load_model("camvid").predict(SAMPLE).labels
    first, classes = page.locator("#list-0 li").first, list(caaseg.load_model("camvid").config.classes or ())
    largest = classes.index(first.locator(".name").inner_text())
    first.locator("input").uncheck()
    page.mouse.move(0, 0)  # away from the class, which is highlighted under the pointer
    assert (overlay_pixels(page)[..., 3] == np.where(labels == largest, 0, 255)).all()
    page.locator("#list-0").get_by_role("button", name="none").click()
    assert not overlay_pixels(page)[..., 3].any()
    page.locator("#list-0").get_by_role("button", name="all").click()
    assert (overlay_pixels(page)[..., 3] == 255).all()
    page.locator("#list-0 li").nth(1).hover()
    assert set(np.unique(overlay_pixels(page)[..., 3])) == {51, 255}
    page.locator("#opacity").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#opacity-value")).to_have_text("80 %")
    expect(page.locator("#overlay-0")).to_have_css("opacity", "0.8")
    box = page.locator("#classes").bounding_box()
    assert box is not None
    page.locator("#classes").hover(position={"x": 0.1 * box["width"], "y": 0.9 * box["height"]})
    expect(page.locator("#tip")).to_have_text(classes[labels[int(0.9 * 427), 64]])
    page.locator("#gallery button").first.hover()
    expect(page.locator("#tip")).to_be_hidden()


@needs_browser
@widths
def test_files_are_saved_as_the_library_has_them(open_page: Open, served: Served, width: int) -> None:
    page, expected = open_page(width), caaseg.load_model("camvid").predict(SAMPLE)

    def saved(link: str) -> tuple[str, io.BytesIO]:
        with page.expect_download() as download:
            page.locator(link).click()
        return download.value.suggested_filename, io.BytesIO(Path(download.value.path()).read_bytes())

    name, content = saved("#save-labels-0")
    assert name == "summer-palace_labels.png"
    assert (np.asarray(Image.open(content)) == expected.labels).all()
    name, content = saved("#save-labels-1")
    assert (np.asarray(Image.open(content)) == served.tiny.predict(SAMPLE).labels).all()
    name, content = saved("#save-masks-0")
    assert name == "summer-palace_masks.zip"
    with zipfile.ZipFile(content) as archive:
        assert len(archive.namelist()) == len(expected.shares)
        mask = np.asarray(Image.open(archive.open("000_Sky.png")))
    assert ((mask == 255) == expected.mask("Sky")).all()
    page.locator("#list-0").get_by_role("button", name="none").click()
    name, content = saved("#save-overlay-0")
    assert name == "summer-palace_overlay.jpg"
    difference = np.asarray(Image.open(content)).astype(int) - expected.image
    assert np.abs(difference).mean() < 3  # all classes are switched off: the photo itself
    name, content = saved("#save-attention")
    assert name == "summer-palace_attention.png"
    assert Image.open(content).size == (1280, 427)


@needs_browser
@widths
def test_the_size_of_the_prediction_is_chosen(open_page: Open, width: int) -> None:
    from playwright.sync_api import expect

    page, model = open_page(width), caaseg.load_model("camvid")
    page.get_by_label("Size").select_option("native")
    expect(page.locator("#facts")).to_contain_text("segmented at its own size")
    palette = np.array(model.config.palette, np.uint8)
    assert (overlay_pixels(page)[..., :3] == palette[model.predict(SAMPLE, size="native").labels]).all()
    page.get_by_label("Size").select_option("side")
    expect(page.locator("#facts")).to_contain_text("segmented at 540 x 360")
    side = page.get_by_label("Length of the short side")
    side.fill("240")
    side.press("Enter")
    expect(page.locator("#facts")).to_contain_text("segmented at 360 x 240")
    assert (overlay_pixels(page)[..., :3] == palette[model.predict(SAMPLE, size=240).labels]).all()
    side.fill("9999")
    side.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("size is '9999'; expected auto, native, or a short side of 1 to")
    expect(page.locator("#facts")).to_contain_text("segmented at 360 x 240")  # what was shown stays


@needs_browser
@widths
def test_several_photos_are_a_gallery_and_files_that_are_not_photos_get_messages(
    open_page: Open, tmp_path: Path, width: int
) -> None:
    from playwright.sync_api import expect

    page = open_page(width)
    large = save_photo(tmp_path / "large.jpg", 6000, 8000)  # 48 megapixels
    tall = save_photo(tmp_path / "tall.png", 300, 90)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "phone.heic").write_bytes(b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic")
    upload(page, large, tall, tmp_path / "notes.txt", tmp_path / "phone.heic")
    expect(page.locator("#facts")).to_contain_text("large.jpg, 8000 x 6000 pixels, segmented at 480 x 360")
    expect(page.locator("#gallery li")).to_have_count(3)
    problems = page.get_by_role("alert").locator("p")
    expect(problems).to_have_count(2)
    expect(problems.nth(0)).to_contain_text("notes.txt: not an image in any of JPEG, PNG")
    reason = "not an image in any of HEIF" if find_spec("pillow_heif") else "pip install 'caaseg[heic]'"
    expect(problems.nth(1)).to_contain_text(reason)
    page.get_by_role("button", name="tall.png", exact=True).click()
    expect(page.locator("#facts")).to_contain_text("tall.png, 90 x 300 pixels")
    expect(page.get_by_role("button", name="tall.png", exact=True)).to_have_attribute("aria-current", "true")
    box = page.locator("#classes").bounding_box()
    assert box is not None
    assert box["height"] / box["width"] == pytest.approx(300 / 90, rel=0.02)
    assert box["height"] < 900
    page.locator("#gallery li").nth(2).hover()
    page.get_by_role("button", name="Remove tall.png").click()
    expect(page.locator("#gallery li")).to_have_count(2)
    expect(page.locator("#facts")).to_contain_text("large.jpg")
    page.get_by_role("button", name="Remove large.jpg").click(force=True)
    expect(page.locator("#facts")).to_contain_text("summer-palace.jpg")


@needs_browser
@widths
def test_two_models_are_compared_with_a_divider(open_page: Open, served: Served, width: int) -> None:
    from playwright.sync_api import expect

    page = open_page(width)
    palette = np.array(served.tiny.predict(SAMPLE).palette, np.uint8)
    assert (overlay_pixels(page, 1)[..., :3] == palette[served.tiny.predict(SAMPLE).labels]).all()
    expect(page.locator("#corner-1")).to_have_text("tiny")
    expect(page.locator("#list-1 .name").first).to_have_text(re.compile("|".join(map(re.escape, CLASSES))))
    divider = page.get_by_label("Divider between the two models")
    divider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#overlay-1")).to_have_css("clip-path", "inset(0px 0px 0px 60%)")
    box = page.locator("#classes").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.up()
    expect(divider).to_have_value("25")
    weights = page.locator("#class-weights").inner_text()
    page.locator("#model-choice").get_by_text("tiny").click()
    expect(page.locator("#class-weights")).not_to_have_text(weights)
    expect(page.locator("#gates")).to_contain_text("of 16 channels")


@needs_browser
@widths
def test_a_pixel_is_selected_by_click_and_by_keys(open_page: Open, width: int) -> None:
    from playwright.sync_api import expect

    page = open_page(width)
    selected, heat = page.locator("#selected"), "document.getElementById('heat').toDataURL()"
    before = page.evaluate(heat)
    page.locator("#split").fill("100")
    box = page.locator("#classes").bounding_box()
    assert box is not None
    page.locator("#classes").click(position={"x": 0.25 * box["width"], "y": 0.75 * box["height"]})
    expect(selected).to_contain_text(re.compile(r"Row 3[12]\d, column 1[56]\d: camvid:\s+\w+, tiny:\s+"))
    page.wait_for_function(f"(before) => {heat} !== before", arg=before)
    row, column = map(int, re.findall(r"\d+", selected.inner_text())[:2])
    for key, expected in [
        ("ArrowUp", (row - 6, column)),
        ("ArrowRight", (row - 6, column + 6)),
        ("Shift+ArrowDown", (row - 5, column + 6)),
        ("Shift+ArrowLeft", (row - 5, column + 5)),
    ]:
        page.keyboard.press(key)  # the picture has the focus since the click
        expect(selected).to_contain_text("Row {}, column {}: ".format(*expected))
    reach = page.evaluate(heat)
    page.get_by_text("Column and row").click()
    page.wait_for_function(f"(before) => {heat} !== before", arg=reach)
    page.locator("#attention").click(position={"x": 20, "y": 20})
    expect(selected).to_contain_text(re.compile(r"Row \d\d?, column \d\d?: "))


@needs_browser
@widths
def test_everything_is_reached_with_the_tab_key_in_reading_order(open_page: Open, width: int) -> None:
    page, reached = open_page(width), []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.id || document.activeElement.name || ''")
        has_label = (
            "(e) => Boolean(e.labels?.length || e.ariaLabel || e.getAttribute('aria-label') || e.textContent.trim())"
        )
        assert page.evaluate(f"({has_label})(document.activeElement)"), name
        if name and name not in reached:
            reached.append(name)
    order = ["files", "opacity", "size", "classes", "split", "save-labels-0", "save-labels-1", "view", "attention"]
    assert [name for name in reached if name in order] == order


@needs_browser
@widths
def test_while_busy_the_picture_stays(open_page: Open, tmp_path: Path, width: int) -> None:
    from playwright.sync_api import expect

    page = open_page(width)
    held: list[Route] = []

    def hold(route: "Route") -> None:
        held.append(route)

    page.route(re.compile(r"/models/0\?"), hold)
    before = overlay_pixels(page)
    upload(page, save_photo(tmp_path / "next.jpg", 200, 300))
    expect(page.locator("#facts")).to_have_text("Segmenting next.jpg …")
    expect(page.locator("#segmentation")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#classes .busy")).to_be_visible()
    expect(page.locator("#photo")).to_be_visible()
    assert (overlay_pixels(page) == before).all()
    page.wait_for_timeout(100)
    page.unroute(re.compile(r"/models/0\?"), hold)
    for route in held:
        route.continue_()
    expect(page.locator("#facts")).to_contain_text("next.jpg, 300 x 200 pixels")
    expect(page.locator("#classes .busy")).to_be_hidden()
    expect(page.locator("#segmentation")).to_have_attribute("aria-busy", "false")


def post(served: Served, name: str, content: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{served.address}/api/photos?name={name}", content, method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def memory_of(process: int) -> float:
    """Return the resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured on Linux")
def test_many_uploads_at_once_a_large_photo_and_a_text_file_are_answered_and_memory_returns(
    served: Served, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4100, 4100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "heavy.png", compress_level=0)
    heavy = (tmp_path / "heavy.png").read_bytes()
    assert len(heavy) > 50_000_000
    photo = SAMPLE.read_bytes()

    def use(name: str, content: bytes) -> tuple[int, str]:
        """Upload a file and segment it with both models; return the status and the id of the photo, or the message."""
        status, about = post(served, name, content)
        if status != 201:
            return status, about["message"]
        for model in (0, 1):
            with urllib.request.urlopen(f"{served.address}/api/photos/{about['id']}/models/{model}") as answer:
                assert sum(json.load(answer)["shares"]) == pytest.approx(1)
        return status, about["id"]

    def remove(photo_id: str) -> None:
        request = urllib.request.Request(f"{served.address}/api/photos/{photo_id}", method="DELETE")
        urllib.request.urlopen(request).close()

    remove(use("first.jpg", photo)[1])  # loads everything that is loaded once
    before = memory_of(served.process)
    with ThreadPoolExecutor(33) as pool:
        tasks = [pool.submit(use, f"{k}.jpg", photo) for k in range(30)]
        tasks += [pool.submit(use, "heavy.png", heavy), pool.submit(use, "notes.txt", b"no picture")]
        answers = [task.result() for task in tasks]
    assert [status for status, _ in answers] == [201] * 31 + [422]
    assert answers[-1][1].startswith("notes.txt: not an image in any of JPEG, PNG")
    for _, photo_id in answers[:-1]:
        remove(photo_id)
    with urllib.request.urlopen(f"{served.address}/api/page") as answer:  # it is alive
        assert answer.status == 200
    deadline = time.monotonic() + 20
    while memory_of(served.process) > before + 100 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert memory_of(served.process) <= before + 100
