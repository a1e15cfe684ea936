"""Self-contained HTML pages: styles, figures and images are embedded, so a page needs no network.

The text is in the templates next to this file. Values from users (classes, file names, recipes) are escaped there.
"""

import base64
import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from caaseg.data.sample import Color
from caaseg.drawing.overlays import mark_pixels, overlay
from caaseg.files import atomic_write

MAX_SIDE = 480  # pixels of a picture on a page


class Picture(NamedTuple):
    """An embedded image."""

    caption: str
    url: str  # a data URL
    width: int
    height: int


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template to a file, atomically."""
    text = templates().get_template(template).render(**values)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@cache
def templates() -> Environment:
    """Return the template environment; inserted values are escaped."""
    environment = Environment(
        loader=PackageLoader("caaseg", "reports/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "duration": duration, "thousands": lambda number: f"{number:,}"}
    return environment


def percent(score: float | None, digits: int = 1, missing: str = "–") -> str:  # noqa: RUF001
    """Format a score in percent, without the sign; `missing` replaces None and NaN."""
    return missing if score is None or math.isnan(score) else f"{100 * score:.{digits}f}"


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def picture(pixels: NDArray[np.uint8], caption: str) -> Picture:
    """Embed pixels (H, W, 3), reduced to MAX_SIDE, as PNG or JPEG, whichever is smaller."""
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    urls = data_url(image), data_url(image, "jpeg", quality=80)
    return Picture(caption, min(urls, key=len), *image.size)


def data_url(image: Image.Image | Path, kind: str = "png", **options: Any) -> str:
    """Return an image or an image file as a data URL."""
    if isinstance(image, Path):
        content = image.read_bytes()
    else:
        encoded = io.BytesIO()
        image.save(encoded, kind, optimize=kind == "png", **options)
        content = encoded.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def picture_of_image(image: Tensor, caption: str = "image") -> Picture:
    """Embed an image (3, H, W)."""
    return picture(_channels_last(image), caption)


def picture_of_labels(
    image: Tensor, labels: Tensor, palette: Sequence[Color], caption: str, background: int | None = None
) -> Picture:
    """Embed an image (3, H, W) blended with the colors of labels or predictions (H, W); ignored pixels are black."""
    return picture(overlay(_channels_last(image), labels.numpy(), palette, background=background), caption)


def picture_of_marks(image: Tensor, marks: Sequence[tuple[Tensor, Color]], label: Tensor, caption: str) -> Picture:
    """Embed a pale gray version of an image (3, H, W) with masks (H, W) in their colors; ignored pixels are black."""
    masks = [(mask.numpy(), color) for mask, color in marks]
    return picture(mark_pixels(_channels_last(image), masks, label.numpy()), caption)


def _channels_last(image: Tensor) -> NDArray[np.uint8]:
    """(3, H, W) -> (H, W, 3)."""
    pixels: NDArray[np.uint8] = image.permute(1, 2, 0).numpy()
    return pixels
