"""One image or one mask out of a file that may be anything: its pixels, or BadFileError with the file's name.

Nothing that is not a plain file is opened (a pipe would wait for ever), only formats named here are tried (some of
Pillow's start other programs), and the size is looked at before a pixel is decoded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from caaseg.data.sample import BadFileError

MAX_PIXELS = 89_000_000
"""Larger images are refused: they may be made to fill the memory. Pillow warns a little above this."""

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM")
MASK_FORMATS = ("PNG", "BMP", "TIFF")  # JPEG and the like change values

SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")
COLORS_TELL = "give the color of each class if colors tell the classes"
PACKED_GRAY = {"L;2": 85, "L;4": 17}
"""Pillow spreads the values of grayscale PNG of 2 and 4 bits over 0 to 255; by these a mask's come back."""


def read_image(path: Path, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """The image as (3, H, W) uint8 in RGB, upright; a view of channels-last memory, as the decoder wrote it.

    Greyscale, palette and CMYK become RGB, 16-bit keeps its high byte, transparency is dropped, EXIF rotation is
    applied. 32-bit and floating images, several frames in one file, anything damaged and anything of more than
    `max_pixels` are refused.
    """
    with _opened(path, IMAGE_FORMATS, "an image", max_pixels) as image:
        return image_pixels(image, str(path))


def image_pixels(image: Image.Image, where: str) -> Tensor:
    """The same of an image that is open already; `where` is what to call it in a message."""
    pixels = np.array(_rgb(_upright(image), where))  # (H, W, 3), a copy: Pillow's own buffer cannot be written to
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_mask(path: Path, *, black_and_white: bool = False, advice: str = COLORS_TELL) -> NDArray[Any]:
    """The raw values of an index or palette mask, (H, W): uint8, or a wider integer where the file is 16 or 32 bits.

    Args:
        path: the mask.
        black_and_white: take RGB too where it holds nothing but black and white, as 0 and 255: many editors save so.
        advice: what to do about a mask in colors.
    """
    with _opened(path, MASK_FORMATS, "a mask") as opened:
        packing = PACKED_GRAY.get(_raw_mode(opened), 1)
        image = _upright(opened)
        if image.mode == "LA" or (image.mode == "RGBA" and black_and_white):
            image = _without_alpha(image, path)
        if image.mode == "RGB" and black_and_white:
            return _black_and_white(image, path, advice)
        if image.mode not in ("1", "L", "P", "I", *SIXTEEN_BIT):
            raise BadFileError(
                f"{path}: a mask of mode {image.mode}; expected one channel of class ids or a palette; {advice}"
            )
        values = np.array(image, dtype=np.uint8 if image.mode == "1" else None)
    return values // packing if packing > 1 else values


def read_color_mask(path: Path) -> NDArray[np.uint8]:
    """The colors of an RGB or palette mask, (H, W, 3)."""
    with _opened(path, MASK_FORMATS, "a mask") as opened:
        image = _upright(opened)
        if image.mode == "RGBA":
            image = _without_alpha(image, path)
        if image.mode not in ("RGB", "P"):
            raise BadFileError(
                f"{path}: a mask of mode {image.mode}; expected RGB or a palette, since classes are told by color"
            )
        return np.array(_rgb(image, str(path)))


@contextmanager
def _opened(
    path: Path, formats: tuple[str, ...], what: str, max_pixels: int = MAX_PIXELS
) -> Iterator[ImageFile.ImageFile]:
    """An open image of one frame and a bearable size; whatever goes wrong inside is the file's fault."""
    try:
        if not path.is_file():
            found = "no such file" if not path.exists() else "not a plain file"
            raise BadFileError(f"{path}: {found}; expected {what}")
        with pillow_allowing(max_pixels), Image.open(path, formats=formats) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Image.DecompressionBombError(f"{width} x {height} pixels")
            if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a phone's JPEG and preview
                raise BadFileError(f"{path}: {frames} frames in one file; expected {what} of one frame")
            yield image
    except BadFileError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        advice = "scale or cut the image, or raise the limit"
        raise BadFileError(f"{path}: {error}; expected at most {max_pixels:,}; {advice}") from error
    except PermissionError as error:
        raise BadFileError(f"{path}: may not be read; change who may read it") from error
    except UnidentifiedImageError as error:
        raise BadFileError(f"{path}: not {what} in any of {', '.join(formats)}; replace or remove the file") from error
    except Exception as error:  # decoders raise everything from SyntaxError to struct.error on damaged files
        raise BadFileError(
            f"{path}: cannot be read as {what} ({type(error).__name__}: {error}); replace or remove the file"
        ) from error


@contextmanager
def pillow_allowing(max_pixels: int) -> Iterator[None]:
    """Pillow's own limit out of the way where ours was raised above it; it knows one for all images."""
    before = Image.MAX_IMAGE_PIXELS
    if before is not None and max_pixels > before:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF entry says. Cheap where there is none."""
    image.load()  # PNG may carry EXIF behind the pixels
    return ImageOps.exif_transpose(image) if image.getexif() else image


def _rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode in SIXTEEN_BIT:
        grey = (np.array(image) >> 8).astype(np.uint8)  # as Pillow itself does with 16-bit RGB
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("1", "L", "CMYK", "YCbCr"):
        return image.convert("RGB")
    if image.mode in TRANSPARENT or image.mode == "P":
        return image.convert("RGBA").convert("RGB")  # a palette with transparency cannot go straight to RGB
    raise BadFileError(
        f"{where}: an image of mode {image.mode}; expected 8 or 16-bit RGB, grayscale, palette or CMYK; convert it"
    )


def _without_alpha(image: Image.Image, path: Path) -> Image.Image:
    """The same mask without its alpha channel, which may not hide anything: a see-through label means nothing."""
    if image.getextrema()[-1] != (255, 255):
        raise BadFileError(f"{path}: a mask with transparent pixels; expected none; save it without transparency")
    return image.convert(image.mode.removesuffix("A"))


def _black_and_white(image: Image.Image, path: Path, advice: str) -> NDArray[np.uint8]:
    """0 where an RGB mask is black and 255 where it is white, (H, W); any other color is an error."""
    red, green, blue = (np.array(channel) for channel in image.split())
    other = (red != green) | (green != blue) | ((red != 0) & (red != 255))
    if other.any():
        color = tuple(int(channel[other][0]) for channel in (red, green, blue))
        raise BadFileError(
            f"{path}: a mask of mode RGB; found the color {color}, expected one channel of class ids, a palette, or "
            f"black and white alone; {advice}"
        )
    return red


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """How the file packs its values, known only before they are decoded."""
    arguments = image.tile[0][3] if image.format == "PNG" and image.tile else ""
    return arguments if isinstance(arguments, str) else ""
