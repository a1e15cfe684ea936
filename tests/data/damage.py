"""Small encoded images and masks of every kind, and random damage to files."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.random import Generator
from PIL import Image

from tests.data.trees import make_image, values_of


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def encoded_images() -> list[bytes]:
    """Return one small image per format and mode."""
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb = make_image(0, 40, 56)
    gray_16 = Image.fromarray((np.arange(40 * 56, dtype=np.uint16) * 29).reshape(40, 56))
    return [
        encode(rgb, "JPEG"),
        encode(rgb, "JPEG", progressive=True, exif=exif),
        encode(rgb.convert("CMYK"), "JPEG"),
        encode(rgb, "PNG", exif=exif),
        encode(rgb.quantize(16), "PNG", transparency=3),
        encode(rgb.convert("LA"), "PNG"),
        encode(gray_16, "PNG"),
        encode(rgb, "WEBP"),
        encode(rgb, "BMP"),
        encode(rgb, "TIFF", compression="tiff_lzw"),
        encode(rgb, "TIFF", exif=exif),
        encode(rgb, "PPM"),
    ]


def encoded_masks() -> list[bytes]:
    """Return one small mask per format and mode."""
    values = Image.fromarray(values_of(0, 1, 2, 255, height=40, width=56).astype(np.uint8))
    palette = values.copy()
    palette.putpalette([200, 0, 0] * 4)
    return [
        encode(values, "PNG"),
        encode(palette, "PNG", bits=8),
        encode(values.convert("1"), "PNG"),
        encode(values.convert("RGB"), "PNG"),
        encode(values.convert("LA"), "PNG"),
        encode(values, "BMP"),
        encode(values, "TIFF", compression="tiff_deflate"),
    ]


def mutated(content: bytes, rng: Generator) -> bytes:
    """Return the file with a few random errors, more often in its header."""
    damaged = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        size = len(damaged)
        if size == 0:
            break
        position = int(rng.integers(0, min(size, 200)) if rng.random() < 0.6 else rng.integers(0, size))
        length = int(rng.integers(1, 9))
        error = rng.integers(0, 6)
        if error == 0:
            damaged[position] ^= 1 << int(rng.integers(0, 8))
        elif error == 1:
            damaged[position : position + length] = rng.bytes(length)
        elif error == 2:
            del damaged[position : position + length]
        elif error == 3:
            damaged[position:position] = damaged[position : position + length * 8]
        elif error == 4:
            value = int(rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 65_536]))
            damaged[position : position + 4] = struct.pack(">I", value)
        else:
            del damaged[max(position, size // 4) :]
    if damaged.startswith(b"\x89PNG") and rng.random() < 0.7:
        _fix_checksums(damaged)  # otherwise the decoder stops at the first error
    return bytes(damaged)


def _fix_checksums(png: bytearray) -> None:
    position = 8
    while position + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, position)
        end = position + 8 + length
        if end + 4 > len(png):
            return
        struct.pack_into(">I", png, end, zlib.crc32(png[position + 4 : end]))
        position = end + 4
