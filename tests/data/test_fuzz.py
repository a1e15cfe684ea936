"""Damaged files of every kind end in a sample or in BadFileError: never in another exception, never in a wait."""

import io
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator
from PIL import Image
from scipy.io import savemat

from caaseg.data.datasets.pairs import Pair, PairDataset
from caaseg.data.decode import read_color_mask
from caaseg.data.labels import LabelTable, distinct_colors
from caaseg.data.prepare.mat import read_mat
from caaseg.data.sample import IGNORE, BadFileError
from tests.data.trees import picture, values_of

pytestmark = pytest.mark.filterwarnings("ignore")  # damaged metadata may make Pillow warn, and is no fault


class TooLongError(BaseException):
    """Not an Exception: nothing may catch it on the way."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def images() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb = picture(0, 40, 56)
    grey_16 = Image.fromarray((np.arange(40 * 56, dtype=np.uint16) * 29).reshape(40, 56))
    return [
        encoded(rgb, "JPEG"),
        encoded(rgb, "JPEG", progressive=True, exif=exif),
        encoded(rgb.convert("CMYK"), "JPEG"),
        encoded(rgb, "PNG", exif=exif),
        encoded(rgb.quantize(16), "PNG", transparency=3),
        encoded(rgb.convert("LA"), "PNG"),
        encoded(grey_16, "PNG"),
        encoded(rgb, "WEBP"),
        encoded(rgb, "BMP"),
        encoded(rgb, "TIFF", compression="tiff_lzw"),
        encoded(rgb, "TIFF", exif=exif),
        encoded(rgb, "PPM"),
    ]


def masks() -> list[bytes]:
    values = Image.fromarray(values_of(0, 1, 2, 255, height=40, width=56).astype(np.uint8))
    palette = values.copy()
    palette.putpalette([200, 0, 0] * 4)
    return [
        encoded(values, "PNG"),
        encoded(palette, "PNG", bits=8),
        encoded(values.convert("1"), "PNG"),
        encoded(values.convert("RGB"), "PNG"),
        encoded(values.convert("LA"), "PNG"),
        encoded(values, "BMP"),
        encoded(values, "TIFF", compression="tiff_deflate"),
    ]


def mutated(content: bytes, rng: Generator) -> bytes:
    """The same file with a few faults, more often near its head, where formats say what follows."""
    damaged = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        size = len(damaged)
        if size == 0:
            break
        at = int(rng.integers(0, min(size, 200)) if rng.random() < 0.6 else rng.integers(0, size))
        length = int(rng.integers(1, 9))
        fault = rng.integers(0, 6)
        if fault == 0:
            damaged[at] ^= 1 << int(rng.integers(0, 8))
        elif fault == 1:
            damaged[at : at + length] = rng.bytes(length)
        elif fault == 2:
            del damaged[at : at + length]
        elif fault == 3:
            damaged[at:at] = damaged[at : at + length * 8]
        elif fault == 4:
            damaged[at : at + 4] = struct.pack(">I", int(rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 65_536])))
        else:
            del damaged[max(at, size // 4) :]
    if damaged.startswith(b"\x89PNG") and rng.random() < 0.7:
        _correct_checksums(damaged)  # or else the decoder stops at the first fault
    return bytes(damaged)


def _correct_checksums(png: bytearray) -> None:
    at = 8
    while at + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        end = at + 8 + length
        if end + 4 > len(png):
            return
        struct.pack_into(">I", png, end, zlib.crc32(png[at + 4 : end]))
        at = end + 4


def outcomes(read: Callable[[Path], object], seeds: list[bytes], path: Path, number: int, seed: int) -> tuple[int, int]:
    """How many of so many damaged files could be read, and how many were refused with a file's name."""
    rng = np.random.default_rng(seed)
    good = bad = 0
    for k in range(number):
        path.write_bytes(mutated(seeds[k % len(seeds)], rng))
        try:
            with within(20):
                read(path)
            good += 1
        except BadFileError as error:
            bad += str(error).startswith(f"{path.parent}/")
    assert good + bad == number  # every error names its file
    return good, bad


def run(folder: Path, number: int, seed: int) -> None:
    """Damage the image of a pair, then its mask."""
    pair = Pair("x", folder / "image", folder / "mask")
    pair.image.write_bytes(images()[0])
    (folder / "mask").write_bytes(masks()[0])
    table = LabelTable({0: 0, 1: 1, 2: 2, 255: IGNORE})
    dataset = PairDataset([pair], classes=("a", "b", "c"), palette=distinct_colors(3), read_label=table.read)
    assert dataset[0].label.shape == (40, 56)
    good, bad = outcomes(lambda _: dataset[0], images(), folder / "image", number, seed)
    assert good > number // 50
    assert bad > number // 4
    pair.image.write_bytes(images()[0])
    good, bad = outcomes(lambda _: dataset[0], masks(), folder / "mask", number, seed + 1)
    assert good > number // 100
    assert bad > number // 4
    good, bad = outcomes(read_color_mask, masks(), folder / "mask", number // 4, seed + 2)
    assert good > 0
    assert bad > number // 16


def test_2000_damaged_images_and_2000_damaged_masks(tmp_path: Path) -> None:
    run(tmp_path, 2000, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 200])
def test_20000_more(tmp_path: Path, seed: int) -> None:
    run(tmp_path, 10_000, seed=seed)


def test_damaged_matlab_files(tmp_path: Path) -> None:
    seeds = []
    for compressed in (False, True):
        path = tmp_path / "seed.mat"
        savemat(path, {"S": values_of(0, 1, 2).astype(np.uint8), "x": "text"}, do_compression=compressed)
        seeds.append(path.read_bytes())
    good, bad = outcomes(lambda path: read_mat(path, "S"), seeds, tmp_path / "a.mat", 2000, seed=0)
    assert good > 100
    assert bad > 200
