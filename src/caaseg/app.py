"""The web app of `caaseg app`: an image, its predicted classes, and the attention of a clicked pixel.

Attention is computed in `analysis/pixel_attention.py` and drawn in `reports/pixel_attention.py`.
This file has the layout.
"""

import ipaddress
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import gradio as gr
import httpx
import numpy as np
import torch
from gradio import processing_utils
from PIL import Image
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from caaseg.analysis.pixel_attention import ImageAttention, predict_with_attention
from caaseg.data.datasets.scenes import FIRST_HOUSE, Scenes
from caaseg.data.decode import read_image
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from caaseg.files import lock_name
from caaseg.models.segmenter import Segmenter
from caaseg.reports import pixel_attention as draw

Models = Sequence[tuple[str, Segmenter]]

MAX_MEGABYTES = 20
UPLOAD_LIMIT_MEGABYTES = 100
"""Gradio aborts larger uploads without a reason. Smaller ones above MAX_MEGABYTES are rejected with a message."""

MAX_PIXELS = 25_000_000
MAX_SIDE = 1024
"""Larger images are scaled down: the attention weights of all pixels are held in memory."""

SUFFIXES = [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"]
EXAMPLE = 96  # index in the test scenes
MAX_SESSIONS = 16  # whose images are held in memory
OPACITY = 60
HOST = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(?::\d+)?")  # IPv6 addresses are in brackets
STYLE = Path(__file__).with_name("app.css")


@dataclass(frozen=True)
class Shown:
    """The image of a session, and the predictions of all models."""

    image: draw.Picture  # (H, W, 3)
    pixel: tuple[int, int]  # row and column of the clicked pixel
    views: tuple[ImageAttention, ...]  # one per model


def example(models: Models) -> tuple[Shown, str]:
    """Return a synthetic scene, the house pixel whose attention reaches furthest, and a sentence about it."""
    image, label, _ = Scenes("test")[EXAMPLE]
    views = _attend(models, image)
    houses = (label >= FIRST_HOUSE) & (label < len(Scenes.classes))
    right = houses & (views[0].labels == label)
    pixels = (right if right.any() else houses).nonzero().tolist()
    pixel = min(((row, column) for row, column in pixels), key=lambda pixel: _own_share(views, pixel))
    text = "A synthetic example: the color of a house is the color of the distant lamp in its row or column."
    if any(model.config.classes != Scenes.classes for _, model in models):
        text += " Not every model here was trained on such scenes."
    return Shown(_channels_last(image), pixel, views), text


def _own_share(views: Sequence[ImageAttention], pixel: tuple[int, int]) -> float:
    """Return the attention weight of a pixel to itself, in the first model that has attention."""
    looked = next((looked for view in views if (looked := view.at(pixel)) is not None), None)
    return 1.0 if looked is None else looked.reach[looked.cell].item()


def uploaded(models: Models, path: Path) -> tuple[Shown, str]:
    """Return the image of an uploaded file with its center selected, and a sentence about it."""
    if (megabytes := path.stat().st_size / 2**20) > MAX_MEGABYTES:
        raise BadFileError(f"{path.name}: {megabytes:.1f} MB; expected at most {MAX_MEGABYTES}; save it smaller")
    try:
        whole = read_image(path, max_pixels=MAX_PIXELS)
    except BadFileError as error:
        raise BadFileError(str(error).replace(str(path), path.name)) from error  # without the server's directory
    image = _scaled_down(whole)
    height, width = image.shape[1:]
    text = f"{path.name}, {whole.shape[2]} x {whole.shape[1]} pixels"
    if image is not whole:
        text += f", scaled down to {width} x {height}"
    return Shown(_channels_last(image), (height // 2, width // 2), _attend(models, image)), f"{text}. Click a pixel."


def _scaled_down(image: Tensor) -> Tensor:
    """Return an image (3, H, W), scaled down if a side is longer than MAX_SIDE."""
    small = Image.fromarray(_channels_last(image))
    small.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return image if small.size == image.shape[:0:-1] else torch.from_numpy(np.array(small)).permute(2, 0, 1)


def _attend(models: Models, image: Tensor) -> tuple[ImageAttention, ...]:
    return tuple(predict_with_attention(model, image) for _, model in models)


def _channels_last(image: Tensor) -> draw.Picture:
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def clicked(shown: Shown, x: int, y: int) -> Shown:
    """Select the pixel at a position in the drawn image, which may be enlarged."""
    height, width = shown.image.shape[:2]
    factor = draw.enlargement(height, width)
    return replace(shown, pixel=(min(y // factor, height - 1), min(x // factor, width - 1)))


def overlays(models: Models, shown: Shown, opacity: float) -> list[Any]:
    """Return the class overlay of each model."""
    return [
        draw.draw_overlay(shown.image, view.labels, draw.classes_of(model)[1], opacity / 100, shown.pixel)
        for (_, model), view in zip(models, shown.views, strict=True)
    ]


def explanations(models: Models, shown: Shown) -> list[Any]:
    """Return legend, sentence, lines, reach and gates of each model, in the order of the page."""
    parts: list[Any] = []
    for (_, model), view in zip(models, shown.views, strict=True):
        names, palette = draw.classes_of(model)
        looked = view.at(shown.pixel)
        name = names[int(view.labels[shown.pixel])]
        lines = None if looked is None else draw.draw_lines(shown.image, looked, shown.pixel)
        reach = None if looked is None else draw.draw_reach(shown.image, looked, shown.pixel)
        gates = "" if looked is None or looked.gates is None else draw.gate_chart(looked.gates)
        parts += [
            draw.legend(view.labels, names, palette),
            draw.pixel_note(looked, model.head, name, shown.pixel, shown.image.shape),
            gr.Image(lines, visible=lines is not None),
            gr.Image(reach, visible=reach is not None),
            gr.HTML(gates, visible=bool(gates)),
        ]
    return parts


def build(models: Models) -> gr.Blocks:
    """Build the page."""
    page: gr.Blocks
    with gr.Blocks(title="caaseg", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        state = gr.State(time_to_live=3600)
        gr.HTML(draw.page_heading(models), padding=False)
        with gr.Row(equal_height=True, elem_id="given"):
            file = gr.File(
                label=f"Your image, up to {MAX_MEGABYTES} MB",
                file_types=SUFFIXES,
                height=132,
                elem_id="upload",
                scale=3,
            )
            opacity = gr.Slider(
                0,
                100,
                OPACITY,
                step=5,
                label="Opacity of the classes, %",
                info="0 shows the image alone.",
                elem_id="opacity",
                scale=2,
            )
        message = gr.HTML(elem_id="message", padding=False)
        pictures: list[gr.Image] = []
        parts: list[gr.Image | gr.HTML] = []
        with gr.Row(elem_id="models"):
            for number, (name, _) in enumerate(models, 1):
                title = "Click a pixel" if len(models) == 1 else f"Click a pixel: {name}"
                picture, others = _panel(title, number, side_by_side=len(models) > 1)
                pictures.append(picture)
                parts += others

        def begin() -> list[Any]:
            shown, sentence = example(models)
            return [shown, draw.message(sentence), *overlays(models, shown, OPACITY), *explanations(models, shown)]

        def take(path: str, strength: float) -> list[Any]:
            try:
                shown, sentence = uploaded(models, Path(path))
            except BadFileError as error:  # the previous image stays
                unchanged = [gr.skip()] * (len(pictures) + len(parts))
                return [None, gr.skip(), draw.message(str(error), problem=True), *unchanged]
            drawn = [*overlays(models, shown, strength), *explanations(models, shown)]
            return [None, shown, draw.message(sentence), *drawn]

        def click(shown: Shown | None, strength: float, event: gr.SelectData) -> dict[Any, Any]:
            if shown is None:  # the session expired
                return {message: draw.message("The session has expired; upload the image again.", problem=True)}
            chosen = clicked(shown, *event.index)
            drawn = [*overlays(models, chosen, strength), *explanations(models, chosen)]
            return {state: chosen, **dict(zip([*pictures, *parts], drawn, strict=True))}

        def fade(shown: Shown | None, strength: float) -> dict[Any, Any]:  # a dict: gradio misreads a list of one
            drawn = [gr.skip()] * len(pictures) if shown is None else overlays(models, shown, strength)
            return dict(zip(pictures, drawn, strict=True))

        # One request at a time: hooks on the model record one image.
        common: dict[str, Any] = {"concurrency_id": "models", "concurrency_limit": 1, "api_visibility": "private"}
        page.load(begin, None, [state, message, *pictures, *parts], **common)
        file.upload(take, [file, opacity], [file, state, message, *pictures, *parts], **common)
        for picture in pictures:
            changed = [state, message, *pictures, *parts]
            picture.select(click, [state, opacity], changed, show_progress="hidden", **common)
        opacity.change(fade, [state, opacity], pictures, show_progress="hidden", trigger_mode="always_last", **common)
    return page


def _panel(title: str, number: int, *, side_by_side: bool) -> tuple[gr.Image, list[gr.Image | gr.HTML]]:
    """Add the panel of one model: the image to click, and the components that `explanations` fills."""

    def image(label: str, name: str) -> gr.Image:
        return gr.Image(
            label=label,
            elem_id=f"{name}-{number}",
            alt_text=label,
            format="png",
            interactive=False,
            buttons=["fullscreen"],
        )

    with gr.Column() if side_by_side else gr.Row():
        with gr.Column(scale=5, min_width=300):
            picture = image(title, "classes")
            legend = gr.HTML(elem_id=f"legend-{number}", padding=False)
        with gr.Column(scale=7, min_width=300):
            note = gr.HTML(elem_id=f"note-{number}", padding=False)
            with gr.Row():
                lines = image("Along its column and its row", "lines")
                reach = image("Both together: its reach", "reach")
            gates = gr.HTML(elem_id=f"gates-{number}", padding=False)
    return picture, [legend, note, lines, reach, gates]


@contextmanager
def upload_directory(parent: Path) -> Iterator[Path]:
    """Yield a new directory for uploads. Directories that killed apps left are deleted.

    Args:
        parent: directory of the uploads of all apps of this user; created if it does not exist.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.lstat().st_uid != _user():  # 0 on Windows, too
        raise CaasegError(
            f"{parent}: belongs to another user, who could change uploads; set TMPDIR to another directory"
        )
    for left in [path for path in parent.iterdir() if path.is_dir()]:
        with lock_name(parent, left.name, wait=False) as is_free:
            if is_free:
                shutil.rmtree(left, ignore_errors=True)
    directory = parent / uuid4().hex
    with lock_name(parent, directory.name, wait=True):  # before the directory exists: it never is without its lock
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _user() -> int:
    """Return the id of the user; 0 on Windows, where everyone has a temporary directory."""
    return os.getuid() if hasattr(os, "getuid") else 0


class KnownHosts:
    """ASGI middleware that refuses requests with an unknown Host header.

    A web page from elsewhere could otherwise let its own name point to this machine, and read the app's answers (DNS
    rebinding). Addresses in numbers are allowed: no page can be loaded from a number that it does not own.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app = app
        self.names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self.is_known(Headers(scope=scope).get("host", "")):
            await self.app(scope, receive, send)
        else:
            text = f"unknown host; expected {' or '.join(sorted(self.names))}; start the app with --host to use another"
            await PlainTextResponse(text, status_code=403)(scope, receive, send)

    def is_known(self, header: str) -> bool:
        """Return whether a Host header, a name with an optional port, is allowed."""
        found = HOST.fullmatch(header.lower())
        return found is not None and (found["name"] in self.names or _is_ip_address(found["address"] or found["name"]))


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class NoDownloads(httpx.AsyncBaseTransport):
    """Refuses to download files that a request names by their URL, before a name is looked up."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.UnsupportedProtocol("files at other addresses are not downloaded; upload them")


def serve(models: Models, *, host: str, port: int | None, on_start: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, and delete uploaded images at the end.

    Args:
        models: one or two models with their names.
        host: address to listen on.
        port: port to listen on; None for a free one.
        on_start: called with the address of the page.
    """
    processing_utils.async_transport = NoDownloads()  # type: ignore[assignment]  # gradio annotates its default, None
    names = ["localhost", host, socket.gethostname(), f"{socket.gethostname()}.local"]
    with upload_directory(Path(gettempdir()) / f"caaseg-app-{_user()}") as directory:
        os.environ["GRADIO_TEMP_DIR"] = str(directory)
        page = build(models)
        system = (
            "system-ui",
            "-apple-system",
            "Segoe UI",
            "Roboto",
            "Noto Sans",
            "sans-serif",
        )  # no download
        mono = ("ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
        try:
            _, address, _ = page.launch(
                server_name=host,
                server_port=port,
                share=False,
                prevent_thread_lock=True,
                quiet=True,
                ssr_mode=False,
                footer_links=[],
                enable_monitoring=False,
                max_file_size=f"{UPLOAD_LIMIT_MEGABYTES}mb",
                state_session_capacity=MAX_SESSIONS,
                theme=gr.themes.Base(primary_hue="sky", neutral_hue="slate", font=system, font_mono=mono),
                css_paths=STYLE,
                app_kwargs={"middleware": [Middleware(KnownHosts, names=names)]},
            )
        except OSError as error:
            reason = str(error).partition(".")[0]
            raise OSError(f"cannot listen on {host} ({reason}); use another --port or --host") from error
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit as with Ctrl-C
        try:
            on_start(address)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            page.close(verbose=False)
