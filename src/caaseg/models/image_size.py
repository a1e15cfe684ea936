"""Size at which a model predicts an image: the size of its training images, unless the user requests another size."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from caaseg.errors import CaasegError
from caaseg.models.windows import Part, Size

ImageSize = Literal["auto", "native"] | int | Size
"""auto, native, the length of the short side, or height and width."""
ROWS_PER_PART = 256


class ShortSides(NamedTuple):
    """Lengths of the short side of the training images."""

    smallest: int
    median: int
    largest: int


def prediction_size(size: Size, setting: ImageSize, trained: ShortSides | None) -> Size:
    """Return the height and width at which an image is predicted.

    With auto, images whose short side is within the range of the training images keep their size, and others get the
    median short side of the training images.

    Args:
        size: height and width of the image.
        setting: the requested size.
        trained: short sides of the training images; None if unknown.
    """
    if setting == "native" or (setting == "auto" and trained is None):
        return size
    if isinstance(setting, tuple):
        return setting
    if isinstance(setting, int):
        return with_short_side(size, setting)
    assert trained is not None
    return size if trained.smallest <= min(size) <= trained.largest else with_short_side(size, trained.median)


def with_short_side(size: Size, length: int) -> Size:
    """Return a size with the same aspect ratio whose short side has this length."""
    factor = length / min(size)
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def check_image_size(setting: object) -> None:
    """Raise CaasegError if a value is not a valid image size."""
    sides = (setting, setting) if isinstance(setting, int) else setting
    is_size = isinstance(sides, tuple) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    if setting not in ("auto", "native") and not is_size:
        raise CaasegError(f"size is {setting!r}; expected auto, native, the short side, or height and width")


def resize_images(images: Tensor, size: Size) -> Tensor:
    """Resize uint8 images with antialiasing: (N, 3, H, W) -> (N, 3, h, w)."""
    if tuple(images.shape[2:]) == size:
        return images
    resized = interpolate(images.float(), size, mode="bilinear", antialias=True, align_corners=False)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def resized_parts(scores: Tensor, size: Size) -> Iterator[Part]:
    """Yield scores (K, h, w) resized to the size of the image, some rows at a time, in bounded memory.

    Bilinear, with pixel centers aligned as in `resize_images`. The result does not depend on how rows are divided.
    """
    height = scores.shape[1]
    for top in range(0, size[0], ROWS_PER_PART):
        part = slice(top, min(top + ROWS_PER_PART, size[0]))
        rows = torch.arange(part.start, part.stop, dtype=torch.float64)
        positions = ((rows + 0.5) * height / size[0] - 0.5).clamp(0, height - 1)
        above = positions.floor().long()
        fraction = (positions - above).to(scores)[:, None]
        above = above.to(scores.device)
        lines = torch.lerp(scores[:, above], scores[:, (above + 1).clamp(max=height - 1)], fraction)  # (K, r, w)
        shape = (len(rows), size[1])
        yield Part(part, slice(0, size[1]), interpolate(lines[None], shape, mode="bilinear", align_corners=False)[0])
