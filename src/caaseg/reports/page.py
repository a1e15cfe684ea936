"""A page that stands alone: its style, figures and pictures are in it, and it asks the network for nothing.

The words come from the templates beside this file; whatever users named (classes, files, recipes) is escaped there.
"""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from caaseg.data.sample import Color
from caaseg.drawing.sheet import marked, overlay
from caaseg.files import atomic_write

WIDEST = 480  # pixels of a picture on a page, on its longer side


class Picture(NamedTuple):
    """An image for a page."""

    caption: str
    address: str  # its whole content, as data
    width: int
    height: int


def write_page(path: Path, template: str, **content: Any) -> None:
    """Fill in a template and write the page, whole or not at all."""
    text = templates().get_template(template).render(**content)
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")


def templates() -> Environment:
    """The templates of this folder; all that is filled into them is escaped."""
    environment = Environment(
        loader=PackageLoader("caaseg", "reports/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "duration": duration, "whole": lambda number: f"{number:,}"}
    return environment


def percent(score: float | None, digits: int = 1) -> str:
    """A score in %; a dash where there is none."""
    return "–" if score is None or math.isnan(score) else f"{100 * score:.{digits}f}"  # noqa: RUF001


def duration(seconds: float) -> str:
    """Seconds as one says them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def picture(pixels: NDArray[np.uint8], caption: str) -> Picture:
    """Pixels (H, W, 3) as PNG or JPEG, whichever is smaller; large ones are scaled down."""
    image = Image.fromarray(pixels)
    image.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    encoded = {"png": _bytes(image, "PNG", optimize=True), "jpeg": _bytes(image, "JPEG", quality=80)}
    kind = min(encoded, key=lambda name: len(encoded[name]))
    return Picture(caption, data_address(encoded[kind], f"image/{kind}"), *image.size)


def data_address(content: bytes, kind: str) -> str:
    """Content as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture_of_image(image: Tensor, caption: str = "image") -> Picture:
    """An image (3, H, W) as it is."""
    return picture(_last(image), caption)


def picture_of_labels(image: Tensor, labels: Tensor, palette: Sequence[Color], caption: str) -> Picture:
    """An image (3, H, W) under the colors of labels or predictions (H, W); ignored ones are black."""
    return picture(overlay(_last(image), labels.numpy(), palette), caption)


def picture_of_marks(image: Tensor, marks: Sequence[tuple[Tensor, Color]], label: Tensor, caption: str) -> Picture:
    """An image (3, H, W), pale and grey, with the pixels (H, W) of each mark in its color; ignored ones are black."""
    return picture(marked(_last(image), [(pixels.numpy(), color) for pixels, color in marks], label.numpy()), caption)


def _last(image: Tensor) -> NDArray[np.uint8]:
    """(3, H, W) -> (H, W, 3)."""
    pixels: NDArray[np.uint8] = image.permute(1, 2, 0).numpy()
    return pixels


def _bytes(image: Image.Image, kind: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()
