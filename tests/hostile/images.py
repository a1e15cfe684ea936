"""Damaged and unusual images and masks, as input of predictions and in datasets."""

import io
import shutil
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from tests.data.damage import encode, encoded_images, encoded_masks, mutated
from tests.hostile.material import choice, shared_onnx, write_data

NAMES = (
    *("a.png", "a.jpg", "A.PNG", "ä.png", "💣.png", "[bold]a.png", "[red]a.png", "a b.png", "-a.png", "\x1b[31m.png"),
    *("a\tb.png", ".png", "a.png.png", "%s.png", "x" * 240 + ".png", "a'b.png", 'a"b.png', "\udcff.png", "a.tif"),
)


def case(rng: Generator, directory: Path) -> list[str]:
    if rng.random() < 0.7:
        return one_image(rng, directory)
    return dataset(rng, directory)


def one_image(rng: Generator, directory: Path) -> list[str]:
    name = choice(rng, NAMES)
    path = directory / "photos" / name
    path.parent.mkdir()
    path.write_bytes(choice(rng, [damaged, damaged, unusual])(rng))
    shutil.copy(shared_onnx(), directory)
    given = f"photos/{name}" if rng.random() < 0.5 else "photos"
    return ["predict", "model.onnx", given, "--out", "out", "--device", "cpu"]


def dataset(rng: Generator, directory: Path) -> list[str]:
    write_data(directory / "data", number=2)
    kind = choice(rng, ["images", "masks", "lists"])
    if kind == "lists":
        (directory / "data" / "train.txt").write_bytes(
            choice(rng, [b"", b"\xff", b"0\n0\n", b"../x\n", b"/etc/passwd\n", b"0\n"])
        )
        (directory / "data" / "val.txt").write_bytes(choice(rng, [b"1\n", b"0\n", b"\x00\n", b"x" * 5000]))
    else:
        content = damaged(rng) if kind == "images" else mutated(choice(rng, seed_masks()), rng)
        (directory / "data" / kind / "1.png").write_bytes(content)
    if rng.random() < 0.3:
        text = choice(
            rng, ["classes: [a, b]", "classes: {a: 0, b: 255}", "classes: {a: [0, 0, 0]}", "classes: &a [*a]", "x", ""]
        )
        (directory / "data" / "classes.yaml").write_text(text)
    if rng.random() < 0.7:
        return ["data", "check", "folder", "--root", "data"]
    shutil.copy(shared_onnx(), directory)
    arguments = ["evaluate", "model.onnx", "--dataset", "folder", "--root", "data", "--workers", "0", "--device", "cpu"]
    return [*arguments, "--split", choice(rng, ["train", "val"])]


@cache
def seed_images() -> list[bytes]:
    return encoded_images()


@cache
def seed_masks() -> list[bytes]:
    return encoded_masks()


def damaged(rng: Generator) -> bytes:
    return mutated(choice(rng, seed_images()), rng)


def unusual(rng: Generator) -> bytes:
    noise = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    sizes = [(1, 1), (1, 300), (300, 1), (2, 2)]
    match int(rng.integers(8)):
        case 0:
            return encode(
                Image.fromarray(noise).resize(choice(rng, sizes)), choice(rng, ["PNG", "JPEG", "BMP", "WEBP"])
            )
        case 1:
            return declared_png(100_000, 100_000)
        case 2:
            return encode(Image.fromarray(noise).convert("F"), "TIFF")
        case 3:
            file = io.BytesIO()
            frames = [Image.fromarray(noise), Image.fromarray(255 - noise)]
            frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
            return file.getvalue()
        case 4:
            return choice(
                rng, [b"", b"\x00", b"<svg/>", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"%PDF-1.4", b"P6\n9 9\n255\n"]
            )
        case 5:
            return encode(Image.fromarray(noise).convert(choice(rng, ["1", "L", "LA", "P", "RGBA", "I;16"])), "PNG")
        case 6:
            exif = Image.Exif()
            exif[0x0112] = int(rng.integers(0, 300))
            return encode(Image.fromarray(noise), "JPEG", exif=exif)
        case _:
            return declared_png(int(rng.integers(0, 1 << 31)), int(rng.integers(0, 1 << 31)))


def declared_png(width: int, height: int) -> bytes:
    """Return a PNG whose header declares a size, with only a few bytes of pixel data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + content + chunk(b"IEND", b"")
