"""The page of `caaseg app`: an image, its classes, and what a pixel of it looks at.

Attention is computed in `analysis/pixel_attention.py` and drawn in `reports/pixel_attention.py`.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from caaseg.analysis.pixel_attention import ImageAttention, predict_with_attention
from caaseg.data.datasets.scenes import FIRST_HOUSE, Scenes
from caaseg.data.decode import read_image
from caaseg.data.sample import BadFileError
from caaseg.models.segmenter import Segmenter
from caaseg.reports import pixel_attention as draw

Models = Sequence[tuple[str, Segmenter]]

MAX_MEGABYTES = 20
NEVER_TAKEN = 100
"""Megabytes at which an upload is cut off before it is all here. Gradio then says only that it failed, so what is too
large by less is taken, and refused in words."""

MAX_PIXELS = 25_000_000
LONGEST = 1024
"""Larger images are scaled down to this: the attention of a click is kept for every pixel."""

SUFFIXES = [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"]
EXAMPLE = 96  # of the test scenes
SESSIONS = 16  # whose images are kept at a time
OPACITY = 60
STYLE = Path(__file__).with_name("app.css")


@dataclass(frozen=True)
class Shown:
    """The image of a session."""

    image: draw.Picture  # (H, W, 3)
    pixel: tuple[int, int]  # row and column of the one that was clicked
    views: tuple[ImageAttention, ...]  # one a model


def example(models: Models) -> tuple[Shown, str]:
    """A drawn scene to begin with, a house clicked where it looks around most, and a sentence about it."""
    image, label, _ = Scenes("test")[EXAMPLE]
    views = _attend(models, image)
    houses = (label >= FIRST_HOUSE) & (label < len(Scenes.classes))
    right = houses & (views[0].labels == label)
    places = (right if right.any() else houses).nonzero().tolist()
    pixel = min(((row, column) for row, column in places), key=lambda place: _own_share(views, place))
    told = "An example drawn by the program: a house has the color of the one lamp far away in its row or its column."
    if any(model.config.classes != Scenes.classes for _, model in models):
        told += " Not every model here has learned such scenes."
    return Shown(_last(image), pixel, views), told


def _own_share(views: Sequence[ImageAttention], pixel: tuple[int, int]) -> float:
    """How much of what a pixel gathers is its own, in the first model that can tell."""
    looked = next((looked for view in views if (looked := view.at(pixel)) is not None), None)
    return 1.0 if looked is None else looked.reach[looked.cell].item()


def uploaded(models: Models, path: Path) -> tuple[Shown, str]:
    """The image of a file that someone gave, its middle clicked, and a sentence about it."""
    if (megabytes := path.stat().st_size / 2**20) > MAX_MEGABYTES:
        raise BadFileError(f"{path.name}: {megabytes:.1f} MB; expected at most {MAX_MEGABYTES}; save it smaller")
    try:
        whole = read_image(path, max_pixels=MAX_PIXELS)
    except BadFileError as error:
        raise BadFileError(str(error).replace(str(path), path.name)) from error  # where it lies here is our affair
    image = _bearable(whole)
    height, width = image.shape[1:]
    told = f"{path.name}, {whole.shape[2]} x {whole.shape[1]} pixels"
    if image is not whole:
        told += f", scaled down to {width} x {height}"
    return Shown(_last(image), (height // 2, width // 2), _attend(models, image)), f"{told}. Click a pixel."


def _bearable(image: Tensor) -> Tensor:
    """(3, H, W), scaled down where a side is too long."""
    small = Image.fromarray(_last(image))
    small.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    return image if small.size == image.shape[:0:-1] else torch.from_numpy(np.array(small)).permute(2, 0, 1)


def _attend(models: Models, image: Tensor) -> tuple[ImageAttention, ...]:
    return tuple(predict_with_attention(model, image) for _, model in models)


def _last(image: Tensor) -> draw.Picture:
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def clicked(shown: Shown, x: int, y: int) -> Shown:
    """The same image with another pixel chosen, by its place in the picture that is drawn of it."""
    height, width = shown.image.shape[:2]
    factor = draw.enlargement(height, width)
    return replace(shown, pixel=(min(y // factor, height - 1), min(x // factor, width - 1)))


def overlays(models: Models, shown: Shown, opacity: float) -> list[Any]:
    """The picture of the classes of each model."""
    return [
        draw.draw_overlay(shown.image, view.labels, draw.classes_of(model)[1], opacity / 100, shown.pixel)
        for (_, model), view in zip(models, shown.views, strict=True)
    ]


def explanations(models: Models, shown: Shown) -> list[Any]:
    """Legend, sentence, lines, reach and gates of each model, in the order of the page."""
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
    """The page."""
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
        told = gr.HTML(elem_id="message", padding=False)
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
            except BadFileError as error:  # what was shown stays
                kept = [gr.skip()] * (len(pictures) + len(parts))
                return [None, gr.skip(), draw.message(str(error), problem=True), *kept]
            drawn = [*overlays(models, shown, strength), *explanations(models, shown)]
            return [None, shown, draw.message(sentence), *drawn]

        def click(shown: Shown | None, strength: float, event: gr.SelectData) -> dict[Any, Any]:
            if shown is None:  # an hour passed, or others came
                return {told: draw.message("The image is no longer kept; give it again.", problem=True)}
            chosen = clicked(shown, *event.index)
            drawn = [*overlays(models, chosen, strength), *explanations(models, chosen)]
            return {state: chosen, **dict(zip([*pictures, *parts], drawn, strict=True))}

        def fade(shown: Shown | None, strength: float) -> dict[Any, Any]:  # by place: a list of one is taken for itself
            drawn = [gr.skip()] * len(pictures) if shown is None else overlays(models, shown, strength)
            return dict(zip(pictures, drawn, strict=True))

        # One at a time: a model listens to one image.
        common: dict[str, Any] = {"concurrency_id": "models", "concurrency_limit": 1, "api_visibility": "private"}
        page.load(begin, None, [state, told, *pictures, *parts], **common)
        file.upload(take, [file, opacity], [file, state, told, *pictures, *parts], **common)
        for picture in pictures:
            picture.select(click, [state, opacity], [state, told, *pictures, *parts], show_progress="hidden", **common)
        opacity.change(fade, [state, opacity], pictures, show_progress="hidden", trigger_mode="always_last", **common)
    return page


def _panel(title: str, number: int, *, side_by_side: bool) -> tuple[gr.Image, list[gr.Image | gr.HTML]]:
    """The place of one model: the picture to click, and what `explanations` fills."""

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


def serve(models: Models, *, host: str, port: int | None, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `tell` hears its address. Uploaded images are removed at the end."""
    with TemporaryDirectory(prefix="caaseg-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        page = build(models)
        system = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")  # no font is fetched
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
                max_file_size=f"{NEVER_TAKEN}mb",
                state_session_capacity=SESSIONS,
                theme=gr.themes.Base(primary_hue="sky", neutral_hue="slate", font=system, font_mono=mono),
                css_paths=STYLE,
            )
        except OSError as error:
            reason = str(error).partition(".")[0]
            raise OSError(f"nothing can listen at {host} ({reason}); give another --port or --host") from error
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same end as Ctrl-C
        try:
            tell(address)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            page.close(verbose=False)
