"""Decode one image or mask file safely: return its pixels, or raise BadFileError with the file's name.

Only regular files are opened (a pipe would block), only the formats listed here are tried (some of Pillow's run other
programs), and the size is checked before any pixel is decoded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from caaseg.data.sample import BadFileError

MAX_PIXELS = 89_000_000
"""Larger images are refused to protect the memory. Pillow's own warning starts slightly above."""

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM")
MASK_FORMATS = ("PNG", "BMP", "TIFF")  # lossy formats such as JPEG change label values

SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")
COLOR_ADVICE = "give the color of each class if classes are stored as colors"
PACKED_GRAY = {"L;2": 85, "L;4": 17}
"""Pillow scales 2-bit and 4-bit grayscale PNG to 0..255; dividing by these factors restores mask values."""


def read_image(path: Path, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Read an image as a (3, H, W) uint8 RGB tensor in channels-last memory, with EXIF rotation applied.

    Grayscale, palette and CMYK images are converted to RGB. 16-bit images keep their high byte. Transparency is
    dropped. 32-bit, floating-point, multi-frame and damaged images and those above `max_pixels` are refused.
    """
    with _open(path, IMAGE_FORMATS, "an image", max_pixels) as image:
        return image_to_tensor(image, str(path))


def read_size(path: Path) -> tuple[int, int]:
    """Return height and width of an image after EXIF rotation, without decoding its pixels."""
    with _open(path, IMAGE_FORMATS, "an image") as image:
        width, height = image.size
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (width, height) if is_turned else (height, width)


def image_to_tensor(image: Image.Image, source: str) -> Tensor:
    """Convert an open image like `read_image`; `source` names it in error messages."""
    pixels = np.array(_to_rgb(_exif_rotated(image), source))  # (H, W, 3), a copy: Pillow's buffer is read-only
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_mask(
    path: Path, *, gray_rgb: bool = False, black_and_white: bool = True, advice: str = COLOR_ADVICE
) -> NDArray[Any]:
    """Read the stored values of an index or palette mask, (H, W): uint8, or wider for 16-bit and 32-bit files.

    Args:
        path: mask file.
        gray_rgb: also accept RGB masks whose three channels are equal.
        black_and_white: accept such masks even if they contain only black and white, read as 0 and 255.
        advice: what to do about a color mask; the end of the error message.
    """
    with _open(path, MASK_FORMATS, "a mask") as opened:
        packing = PACKED_GRAY.get(_raw_mode(opened), 1)
        image = _exif_rotated(opened)
        if image.mode == "LA" or (image.mode == "RGBA" and gray_rgb):
            image = _drop_opaque_alpha(image, path)
        if image.mode == "RGB" and gray_rgb:
            return _gray_values(image, path, black_and_white, advice)
        if image.mode not in ("1", "L", "P", "I", *SIXTEEN_BIT):
            raise BadFileError(
                f"{path}: a mask of mode {image.mode}; expected one channel of class ids or a palette; {advice}"
            )
        values = np.array(image, dtype=np.uint8 if image.mode == "1" else None)
    return values // packing if packing > 1 else values


def read_color_mask(path: Path) -> NDArray[np.uint8]:
    """Read the colors of an RGB or palette mask, (H, W, 3)."""
    with _open(path, MASK_FORMATS, "a mask") as opened:
        image = _exif_rotated(opened)
        if image.mode == "RGBA":
            image = _drop_opaque_alpha(image, path)
        if image.mode not in ("RGB", "P"):
            raise BadFileError(
                f"{path}: a mask of mode {image.mode}; expected RGB or a palette, because classes are given as colors"
            )
        return np.array(_to_rgb(image, str(path)))


@contextmanager
def _open(
    path: Path, formats: tuple[str, ...], kind: str, max_pixels: int = MAX_PIXELS
) -> Iterator[ImageFile.ImageFile]:
    """Open an image with one frame and at most `max_pixels`; turn every error inside into a BadFileError."""
    try:
        if not path.is_file():
            problem = "not a regular file" if path.exists() else "no such file"
            raise BadFileError(f"{path}: {problem}; expected {kind}; check its name, or add it")
        # Not Image.open(path): Pillow 12 maps uncompressed TIFF files into memory and then rotates them wrongly.
        with pillow_pixel_limit(max_pixels), open(path, "rb") as file, Image.open(file, formats=formats) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Image.DecompressionBombError(f"{width} x {height} pixels")
            if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a phone's JPEG and preview
                raise BadFileError(f"{path}: {frames} frames in one file; expected {kind} with one frame")
            yield image
    except BadFileError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        advice = "resize or crop the image, or raise the limit"
        raise BadFileError(f"{path}: {error}; expected at most {max_pixels:,}; {advice}") from error
    except PermissionError as error:
        raise BadFileError(f"{path}: no permission to read it; change its permissions") from error
    except UnidentifiedImageError as error:
        raise BadFileError(f"{path}: not {kind} in any of {', '.join(formats)}; replace or move it") from error
    except Exception as error:  # decoders raise everything from SyntaxError to struct.error on damaged files
        raise BadFileError(
            f"{path}: cannot be read as {kind} ({type(error).__name__}: {error}); replace or move it"
        ) from error


@contextmanager
def pillow_pixel_limit(max_pixels: int) -> Iterator[None]:
    """Raise Pillow's global pixel limit to at least `max_pixels` inside the block."""
    before = Image.MAX_IMAGE_PIXELS
    if before is not None and max_pixels > before:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _exif_rotated(image: Image.Image) -> Image.Image:
    image.load()  # PNG may store EXIF after the pixels
    return ImageOps.exif_transpose(image) if image.getexif() else image  # exif_transpose copies even without EXIF


def _to_rgb(image: Image.Image, source: str) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode in SIXTEEN_BIT:
        gray = (np.array(image) >> 8).astype(np.uint8)  # as Pillow does for 16-bit RGB
        return Image.fromarray(gray).convert("RGB")
    if image.mode in ("1", "L", "CMYK", "YCbCr"):
        return image.convert("RGB")
    if image.mode in TRANSPARENT or image.mode == "P":
        return image.convert("RGBA").convert("RGB")  # a palette with transparency cannot be converted directly
    raise BadFileError(
        f"{source}: an image of mode {image.mode}; expected 8 or 16-bit RGB, grayscale, palette or CMYK; convert it"
    )


def _drop_opaque_alpha(image: Image.Image, path: Path) -> Image.Image:
    """Remove the alpha channel of a mask; a transparent label is ambiguous and an error."""
    if image.getextrema()[-1] != (255, 255):
        raise BadFileError(f"{path}: a mask with transparent pixels; expected none; save it without transparency")
    return image.convert(image.mode.removesuffix("A"))


def _gray_values(image: Image.Image, path: Path, black_and_white: bool, advice: str) -> NDArray[np.uint8]:
    """Return the values of an RGB mask with equal channels, (H, W)."""
    red, green, blue = (np.array(channel) for channel in image.split())
    colored = (red != green) | (green != blue)
    if not black_and_white and not colored.any() and (red == 255).any() and ((red == 0) | (red == 255)).all():
        colored = red == 255
    if colored.any():
        color = tuple(int(channel[colored][0]) for channel in (red, green, blue))
        expected = "a palette, or equal channels" if black_and_white else "or a palette"
        raise BadFileError(
            f"{path}: a mask of mode RGB with the color {color}; expected one channel of class ids, {expected}; "
            f"{advice}"
        )
    return red


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Return how a PNG packs its values; Pillow knows this only before decoding."""
    arguments = image.tile[0][3] if image.format == "PNG" and image.tile else ""
    return arguments if isinstance(arguments, str) else ""
