"""Small videos for tests."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

from tests.small_models import random_images

UNIT = Fraction(1, 1000)


class Clip(NamedTuple):
    """Content of a video file."""

    frames: list[NDArray[np.uint8]]  # (H, W, 3), as stored
    times: list[Fraction]  # in seconds
    duration: Fraction
    codec: str
    pixel_format: str | None


def write_clip(
    path: Path,
    number: int = 6,
    *,
    size: tuple[int, int] = (32, 48),
    durations: Sequence[int] = (40,),
    turned: int = 0,
    faststart: bool = False,
) -> None:
    """Write slowly changing noise as H.264.

    Args:
        path: the file; its suffix decides the container.
        number: number of frames.
        size: height and width.
        durations: of successive frames in milliseconds, repeated.
        turned: degrees by which players rotate the video counterclockwise.
        faststart: write the index before the frames.
    """
    coarse = random_images(2, size[0] // 8, size[1] // 8).permute(0, 2, 3, 1).numpy().repeat(8, 1).repeat(8, 2)
    with av.open(str(path), "w", container_options={"movflags": "faststart"} if faststart else {}) as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "10", "bf": "0"})
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = UNIT
        stream.height, stream.width = coarse.shape[1:3]
        if turned:
            stream.set_display_rotation(turned)
        time = 0
        for k in range(number):
            mixed = coarse[0] * (1 - k / number) + coarse[1] * (k / number)
            frame = av.VideoFrame.from_ndarray(mixed.astype(np.uint8), format="rgb24")
            frame.pts, frame.time_base, frame.duration = time, UNIT, durations[k % len(durations)]
            time += durations[k % len(durations)]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def read_clip(path: Path) -> Clip:
    """Read a video with PyAV alone."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        unit = stream.time_base
        assert unit is not None
        return Clip(
            [np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8) for frame in frames],
            [(frame.pts or 0) * unit for frame in frames],
            (stream.duration or 0) * unit,
            stream.codec_context.name,
            stream.pix_fmt,
        )
