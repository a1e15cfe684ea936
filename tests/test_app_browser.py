"""The page of `caaseg app` in a browser, with no network but this machine."""

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.datasets.scenes import Scenes
from tests.small_models import scenes_model

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE_MS = 30_000  # for a busy machine; nothing waits so long that goes well


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a page that a process of its own serves; when that ends, it leaves nothing behind."""
    scenes_model().save_pretrained(tmp_path / "model")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    served = subprocess.Popen(
        [sys.executable, "-m", "caaseg", "app", "model", "--device", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert served.stdout is not None
    with served.stdout as lines:
        found = re.match(r"page: (http://127\.0\.0\.1:\d+)/", lines.readline())
        assert found is not None
        try:
            yield found[1]
        finally:
            served.terminate()
            assert served.wait(30) == 0
    assert list(temporary.glob("caaseg-app-*/*")) == []


@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed")
def test_someone_uploads_an_image_clicks_pixels_and_gives_files_that_are_none(address: str, tmp_path: Path) -> None:
    from playwright.sync_api import Locator, Route, expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    outside: list[str] = []

    def only_here(route: Route) -> None:
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    photo = Scenes("val", size=(96, 160))[0].image.permute(1, 2, 0).numpy()
    Image.fromarray(photo).save(tmp_path / "photo.png")
    (tmp_path / "notes.png").write_text("no picture")
    Image.new("1", (6000, 5000)).save(tmp_path / "huge.png")
    (tmp_path / "heavy.png").write_bytes(bytes(21 * 2**20))

    with sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox
        browser = driver.chromium.launch(executable_path=BROWSER, args=options)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.route("**/*", only_here)
        page.goto(address)
        message, note, legend = (page.locator(selector) for selector in ("#message", "#note-1", "#legend-1"))
        classes, lines, reach = (page.locator(f"#{name}-1 img") for name in ("classes", "lines", "reach"))

        def upload(name: str) -> None:
            page.locator("#upload input[type=file]").set_input_files(tmp_path / name)

        def address_of(picture: Locator) -> str:
            return picture.get_attribute("src") or ""

        def pixels_of(picture: Locator) -> NDArray[np.uint8]:
            return np.array(Image.open(io.BytesIO(page.request.get(address_of(picture)).body())).convert("RGB"))

        def click(row: int, column: int) -> None:
            """The pixel of the photo, which is drawn four times as large and then scaled by the page."""
            before = address_of(reach)
            box = classes.bounding_box()
            assert box is not None
            position = {"x": (column + 0.5) / 160 * box["width"], "y": (row + 0.5) / 96 * box["height"]}
            classes.click(position=position)  # type: ignore[arg-type]
            expect(note).to_contain_text(re.compile(rf"Row {row}, column {column}: "))
            expect(reach).not_to_have_attribute("src", before)

        # An example is there from the start.
        expect(message).to_contain_text("A synthetic example")
        expect(classes).to_be_visible()
        expect(reach).to_be_visible()
        example = address_of(classes)

        # An uploaded image replaces it, with the classes that were found.
        upload("photo.png")
        expect(message).to_contain_text("photo.png, 160 x 96 pixels")
        expect(classes).not_to_have_attribute("src", example)
        drawn = pixels_of(classes)
        assert drawn.shape == (384, 640, 3)
        assert 1 <= legend.locator("li").count() <= len(Scenes.classes)
        expect(legend).to_contain_text("%")

        # Two pixels have different attention.
        click(10, 20)
        first = [pixels_of(lines), pixels_of(reach)]
        expect(page.locator("#gates-1")).to_contain_text("Channel gates of 8 channels")
        click(80, 130)
        second = [pixels_of(lines), pixels_of(reach)]
        for before, after in zip(first, second, strict=True):
            assert (before != after).any(-1).mean() > 0.01

        # Without opacity the image itself is left, but for the ring around the pixel.
        covered = address_of(classes)
        page.locator("#opacity input[type=number]").fill("0")
        page.locator("#opacity input[type=number]").press("Enter")
        expect(classes).not_to_have_attribute("src", covered)
        bare, enlarged = pixels_of(classes), photo.repeat(4, 0).repeat(4, 1)
        assert (bare != enlarged).any(-1).mean() < 0.01
        assert (drawn != enlarged).any(-1).mean() > 0.5

        # What is no image, too many pixels or too large a file is refused in words, and what was shown stays.
        shown = address_of(classes)
        alert = message.get_by_role("alert")
        upload("notes.png")
        expect(alert).to_contain_text("notes.png: not an image in any of JPEG, PNG")
        upload("huge.png")
        expect(alert).to_contain_text("huge.png: 6000 x 5000 pixels; expected at most 25,000,000")
        upload("heavy.png")
        expect(alert).to_contain_text("heavy.png: 21.0 MB; expected at most 20")
        expect(classes).to_have_attribute("src", shown)

        # And it goes on.
        upload("photo.png")
        expect(message).to_contain_text("photo.png, 160 x 96 pixels")
        expect(alert).to_have_count(0)
        browser.close()
    assert outside == []
