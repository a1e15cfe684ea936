"""Every kind of image and mask is read correctly, or refused by name."""

import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from caaseg.data.decode import MAX_PIXELS, read_color_mask, read_image, read_mask
from caaseg.data.sample import BadFileError
from tests.data.trees import make_image

ROTATED = 6  # EXIF orientation: rotate by 90 degrees clockwise


def as_array(path: Path) -> NDArray[np.uint8]:
    image = read_image(path)
    assert image.dtype == torch.uint8
    return image.permute(1, 2, 0).numpy()


def png(rows: list[bytes], width: int, *, depth: int, kind: int = 0) -> bytes:
    """A PNG file of packed rows, for depths that Pillow does not write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, len(rows), depth, kind, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".ppm"])
def test_lossless_rgb_is_exact(tmp_path: Path, suffix: str) -> None:
    make_image(1).save(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(as_array(tmp_path / f"a{suffix}"), np.array(make_image(1)))


@pytest.mark.parametrize("suffix", [".jpg", ".webp"])
def test_lossy_rgb_is_close(tmp_path: Path, suffix: str) -> None:
    make_image(1).save(tmp_path / f"a{suffix}", quality=95)
    difference = as_array(tmp_path / f"a{suffix}").astype(int) - np.array(make_image(1))
    assert abs(difference).mean() < 8


def test_the_tensor_can_be_written_to(tmp_path: Path) -> None:
    make_image(1).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png")
    assert image.shape == (3, 12, 16)
    image += 1
    assert torch.equal(read_image(tmp_path / "a.png") + 1, image)


def test_grayscale_palette_and_black_and_white_become_rgb(tmp_path: Path) -> None:
    for mode in ("L", "P", "1"):
        image = make_image(2).convert(mode)
        image.save(tmp_path / f"{mode}.png")
        np.testing.assert_array_equal(as_array(tmp_path / f"{mode}.png"), np.array(image.convert("RGB")))


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    make_image(2).convert("CMYK").save(tmp_path / "a.jpg", quality=95)
    assert abs(as_array(tmp_path / "a.jpg").astype(int) - np.array(make_image(2))).mean() < 8


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_dropped(tmp_path: Path, mode: str) -> None:
    image = make_image(3).convert("L").convert("RGB").convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    if mode == "PA":
        image.quantize(16).save(tmp_path / "a.png")  # a palette with transparency in bytes
    else:
        image.convert(mode).save(tmp_path / "a.png")
    found = as_array(tmp_path / "a.png")
    if mode != "PA":
        np.testing.assert_array_equal(found, np.array(image.convert("RGB")))
    assert found.shape == (12, 16, 3)


def test_sixteen_bits_keep_the_high_byte(tmp_path: Path) -> None:
    values = np.arange(12 * 16, dtype=np.uint16).reshape(12, 16) * 300
    Image.fromarray(values).save(tmp_path / "gray.png")
    np.testing.assert_array_equal(as_array(tmp_path / "gray.png"), np.stack([values >> 8] * 3, axis=2))
    Image.fromarray(values).save(tmp_path / "gray.tif")
    np.testing.assert_array_equal(as_array(tmp_path / "gray.tif"), np.stack([values >> 8] * 3, axis=2))
    (tmp_path / "rgb.png").write_bytes(png([bytes([200, 1, 100, 1, 50, 1])], 1, depth=16, kind=2))
    assert as_array(tmp_path / "rgb.png").tolist() == [[[200, 100, 50]]]


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = ROTATED
    for name in ("a.png", "a.jpg", "a.webp", "a.tif"):
        make_image(4).save(tmp_path / name, exif=exif)
        plain = make_image(4)
        plain.save(tmp_path / f"plain{name}")
        upright = np.rot90(as_array(tmp_path / f"plain{name}"), k=-1)
        np.testing.assert_array_equal(as_array(tmp_path / name), upright)


def test_exif_rotation_of_masks_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = ROTATED
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    colors = np.array(make_image(4, 3, 4))
    for name in ("a.png", "a.tif"):
        Image.fromarray(values).save(tmp_path / name, exif=exif)
        np.testing.assert_array_equal(read_mask(tmp_path / name), np.rot90(values, k=-1))
        Image.fromarray(colors).save(tmp_path / name, exif=exif)
        np.testing.assert_array_equal(read_color_mask(tmp_path / name), np.rot90(colors, k=-1))


@pytest.mark.parametrize(
    ("values", "mode"),
    [(np.arange(4.0, dtype=np.float32).reshape(2, 2), "F"), (np.full((2, 2), 70_000, dtype=np.int32), "I")],
)
def test_float_and_32_bit_images_are_refused(tmp_path: Path, values: NDArray[Any], mode: str) -> None:
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(BadFileError, match=rf"a\.tif: an image of mode {mode}; expected 8 or 16-bit RGB.*convert it"):
        read_image(tmp_path / "a.tif")


def test_several_frames_are_refused(tmp_path: Path) -> None:
    for name in ("a.tif", "a.png", "a.webp"):
        make_image(1).save(tmp_path / name, save_all=True, append_images=[make_image(2)])
        with pytest.raises(BadFileError, match=rf"{name}: 2 frames in one file; expected an image with one frame"):
            read_image(tmp_path / name)


@pytest.mark.filterwarnings("ignore")  # Pillow warns between its limit and twice that
@pytest.mark.parametrize("side", [9_500, 14_000, 60_000])
def test_decompression_bombs_are_refused_before_decoding(tmp_path: Path, side: int) -> None:
    row = bytes(side // 8)
    content = bytearray(png([row], side, depth=1))
    content[20:24] = struct.pack(">I", side)  # height and checksum
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    (tmp_path / "bomb.png").write_bytes(content)
    assert side * side > MAX_PIXELS
    for read in (read_image, read_mask, read_color_mask):
        with pytest.raises(BadFileError, match=r"bomb\.png: .*pixels.*; expected at most 89,000,000; resize or crop"):
            read(tmp_path / "bomb.png")


def test_the_limit_can_be_raised_above_pillow_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_image(1, 30, 30).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow refuses more than twice its limit
    with pytest.raises(BadFileError, match=r"large\.png: .*expected at most 100; .*or raise the limit"):
        read_image(tmp_path / "large.png", max_pixels=100)
    assert read_image(tmp_path / "large.png", max_pixels=900).shape == (3, 30, 30)
    with pytest.raises(BadFileError, match=r"large\.png: .*expected at most 899"):
        read_image(tmp_path / "large.png", max_pixels=899)
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp", ".tif"])
def test_truncated_files_are_refused_wherever_they_were_cut(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    make_image(5, 40, 60).save(path)
    content = path.read_bytes()
    for share in (0, 0.01, 0.3, 0.6, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(BadFileError, match=re.escape(f"{path}: ")):
            read_image(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("not an image")
    with pytest.raises(BadFileError, match=r"text\.jpg: not an image in any of JPEG, PNG.*replace or move it"):
        read_image(tmp_path / "text.jpg")
    with pytest.raises(BadFileError, match=r"none\.jpg: no such file; expected an image"):
        read_image(tmp_path / "none.jpg")
    with pytest.raises(BadFileError, match=r"not a regular file; expected a mask"):
        read_mask(tmp_path)
    (tmp_path / "run.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(BadFileError, match=r"run\.eps: not an image"):  # Pillow would start another program
        read_image(tmp_path / "run.eps")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadFileError, match=r"pipe\.png: not a regular file"):
        read_image(tmp_path / "pipe.png")


def test_index_and_palette_masks_give_their_values(tmp_path: Path) -> None:
    values = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)
    Image.fromarray(values).save(tmp_path / "index.png")
    palette = Image.fromarray(values)
    palette.putpalette(list(range(256)) * 3)
    palette.save(tmp_path / "palette.png")
    for name in ("index.png", "palette.png"):
        np.testing.assert_array_equal(read_mask(tmp_path / name), values)
        assert read_mask(tmp_path / name).dtype == np.uint8


def test_masks_of_1_2_4_and_16_bits_give_their_values(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png([bytes([0b01100000])], 4, depth=1))
    (tmp_path / "2.png").write_bytes(png([bytes([0b00011011])], 4, depth=2))
    (tmp_path / "4.png").write_bytes(png([bytes([0x0B, 0xF3])], 4, depth=4))
    Image.fromarray(np.array([[0, 1, 459, 65_535]], dtype=np.uint16)).save(tmp_path / "16.png")
    found = {name: read_mask(tmp_path / f"{name}.png").tolist() for name in ("1", "2", "4", "16")}
    assert found == {"1": [[0, 1, 1, 0]], "2": [[0, 1, 2, 3]], "4": [[0, 11, 15, 3]], "16": [[0, 1, 459, 65_535]]}


def test_a_palette_of_4_bits_is_not_mistaken_for_gray(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1, 15, 3]], dtype=np.uint8))
    image.putpalette([*range(48)])
    image.save(tmp_path / "m.png", bits=4)
    assert read_mask(tmp_path / "m.png").tolist() == [[0, 1, 15, 3]]


def test_color_masks_give_their_colors(tmp_path: Path) -> None:
    colors = np.array(make_image(6))
    Image.fromarray(colors).save(tmp_path / "rgb.png")
    Image.fromarray(colors).convert("RGBA").save(tmp_path / "opaque.png")
    for name in ("rgb.png", "opaque.png"):
        np.testing.assert_array_equal(read_color_mask(tmp_path / name), colors)
    palette = make_image(6).quantize(8)
    palette.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_color_mask(tmp_path / "palette.png"), np.array(palette.convert("RGB")))


def test_rgb_with_equal_channels_gives_values_on_request_and_colors_are_refused(tmp_path: Path) -> None:
    binary = np.where(np.arange(12 * 16).reshape(12, 16) % 3 == 0, 255, 0).astype(np.uint8)
    for mode in ("RGB", "RGBA"):
        for values in (binary, binary // 2):
            Image.fromarray(values).convert(mode).save(tmp_path / f"{mode}.png")
            np.testing.assert_array_equal(read_mask(tmp_path / f"{mode}.png", gray_rgb=True), values)
            with pytest.raises(BadFileError, match=rf"{mode}\.png: a mask of mode {mode}; expected one channel"):
                read_mask(tmp_path / f"{mode}.png")
    for color in ((0, 0, 255), (255, 255, 0), (255, 0, 255), (1, 1, 2)):
        mask = Image.fromarray(binary).convert("RGB")
        mask.putpixel((5, 7), color)
        mask.save(tmp_path / "other.png")
        with pytest.raises(BadFileError, match=re.escape(f"other.png: a mask of mode RGB with the color {color}; ")):
            read_mask(tmp_path / "other.png", gray_rgb=True)


def test_black_and_white_rgb_can_be_refused(tmp_path: Path) -> None:
    for values in ([0, 255], [255, 255]):
        Image.fromarray(np.resize(values, (4, 4)).astype(np.uint8)).convert("RGB").save(tmp_path / "binary.png")
        with pytest.raises(BadFileError, match=r"binary\.png: a mask of mode RGB with the color \(255, 255, 255\)"):
            read_mask(tmp_path / "binary.png", gray_rgb=True, black_and_white=False)
    Image.fromarray(np.resize([0, 3, 255], (4, 4)).astype(np.uint8)).convert("RGB").save(tmp_path / "ids.png")
    assert set(read_mask(tmp_path / "ids.png", gray_rgb=True, black_and_white=False).flat) == {0, 3, 255}


def test_masks_of_the_wrong_kind_are_refused_by_name(tmp_path: Path) -> None:
    make_image(1).save(tmp_path / "rgb.png")
    with pytest.raises(BadFileError, match=r"rgb\.png: a mask of mode RGB; expected one channel.*color of each class"):
        read_mask(tmp_path / "rgb.png")
    make_image(1).convert("L").save(tmp_path / "gray.png")
    with pytest.raises(BadFileError, match=r"gray\.png: a mask of mode L; expected RGB or a palette"):
        read_color_mask(tmp_path / "gray.png")
    make_image(1).convert("L").save(tmp_path / "lossy.jpg")
    with pytest.raises(BadFileError, match=r"lossy\.jpg: not a mask in any of PNG, BMP, TIFF"):
        read_mask(tmp_path / "lossy.jpg")


def test_a_transparent_mask_is_refused_and_an_opaque_one_read(tmp_path: Path) -> None:
    mask = Image.new("LA", (4, 4), (3, 255))
    mask.save(tmp_path / "opaque.png")
    assert read_mask(tmp_path / "opaque.png").tolist() == [[3] * 4] * 4
    mask.putpixel((1, 1), (3, 254))
    mask.save(tmp_path / "clear.png")
    with pytest.raises(BadFileError, match=r"clear\.png: a mask with transparent pixels; expected none"):
        read_mask(tmp_path / "clear.png")
    mask.convert("RGBA").save(tmp_path / "clear.png")
    with pytest.raises(BadFileError, match=r"clear\.png: a mask with transparent pixels; expected none"):
        read_color_mask(tmp_path / "clear.png")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_image(1).save(tmp_path / "a.png")

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(BadFileError, match=r"a\.png: cannot be read as an image \(OSError: .*Input/output error"):
        read_image(tmp_path / "a.png")


def test_missing_read_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    make_image(1).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "open", refused)  # root ignores file permissions
    with pytest.raises(BadFileError, match=r"a\.png: no permission to read it; change its permissions"):
        read_image(tmp_path / "a.png")
