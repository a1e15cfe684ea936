"""Videos: frames of a file, their labels, and the overlay video. Reading and writing need PyAV, the extra `video`.

The overlay video is H.264 in MP4. It has the frames and the frame times of the input and a legend at the right, but no
sound. It is encoded in segments of SEGMENT_FRAMES frames: files in a hidden directory beside the overlay video. A call
that was killed continues after its last finished segment. At the end the packets of all segments are joined.
"""

import glob
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from itertools import chain, count, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caaseg.data.decode import MAX_PIXELS
from caaseg.data.inputs import VIDEO_SUFFIXES
from caaseg.data.sample import BadFileError, Color
from caaseg.drawing.legend import draw_legend
from caaseg.drawing.overlays import background_class, overlay
from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.models.predictor import Predictor, read_pixels

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

FORMATS = "mov,matroska,webm,avi,mpeg,mpegts,asf,ogg,flv"
"""Accepted container formats. Playlists are excluded, because they name other files and network addresses."""
ENCODER = "libx264"
ENCODER_OPTIONS = {"crf": "20", "preset": "fast", "bf": "0"}  # without B-frames, packets have the order of the frames
SEGMENT_FRAMES = 50
MISSING_S = 1  # a video that ends this many seconds before its stated duration is damaged
ADVICE = "replace the file, or convert it to MP4"


class Frame(NamedTuple):
    """A frame of a video."""

    pixels: Tensor  # (3, H, W) uint8, RGB, upright
    duration: Fraction  # in seconds


class VideoSummary(NamedTuple):
    """Number of frames of an overlay video."""

    frames: int
    predicted: int  # by this call; the others were finished before


def is_video(path: Path) -> bool:
    """Return whether a file name has the suffix of a video."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def read_frames(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Iterator[Frame]:
    """Yield the frames of a video. Raises BadFileError if it is not a video, is damaged, or exceeds `max_pixels`."""
    with _open(Path(path), max_pixels) as container:
        yield from _frames(container, Path(path))


def predict_frames(predictor: Predictor, frames: Iterable[Any], *, smooth: float = 0.0) -> Iterator[NDArray[np.uint8]]:
    """Yield the class ids of each frame, (H, W).

    Args:
        predictor: predicts the frames.
        frames: images, as `Predictor` takes them; of one size if `smooth` is not 0.
        smooth: weight of the earlier frames in an exponential moving average of the scores, 0 or more and below 1.
            With a larger weight, classes flicker less, but the classes of moving objects lag behind.
    """
    average = ScoreAverage(smooth)
    for frame in frames:
        yield average.labels(predictor, read_pixels(frame))


class ScoreAverage:
    """Exponential moving average of the scores of successive frames."""

    def __init__(self, smooth: float) -> None:
        if not 0 <= smooth < 1:
            raise CaasegError(f"smooth is {smooth}; expected 0 or more and below 1")
        self.smooth = smooth
        self.scores: Tensor | None = None  # (K, H, W)

    def labels(self, predictor: Predictor, pixels: Tensor) -> NDArray[np.uint8]:
        """Update the average with a frame (3, H, W), and return the class ids (H, W)."""
        if not self.smooth:
            return predictor(pixels)
        scores = predictor.scores(pixels[None])[0]
        self.scores = scores if self.scores is None else self.smooth * self.scores + (1 - self.smooth) * scores
        labels: NDArray[np.uint8] = self.scores.max(0).indices.to(torch.uint8).cpu().numpy()
        return labels


def write_overlay_video(
    predictor: Predictor,
    source: Path,
    target: Path,
    *,
    classes: Sequence[str],
    palette: Sequence[Color],
    key: str,
    smooth: float = 0.0,
    max_pixels: int = MAX_PIXELS,
    progress: Callable[[int, int | None], None] = lambda *_: None,
) -> VideoSummary:
    """Write the overlay video of a video.

    Args:
        predictor: predicts the frames.
        source: the video.
        target: file name that ends in .mp4. The caller holds its lock.
        classes: names for the legend.
        palette: color of class k at position k.
        key: identifies the source, the model and its options. Segments of an earlier call with another key are deleted.
        smooth: as in `predict_frames`.
        max_pixels: limit of height times width.
        progress: called with the number of frames done, and the total or None.
    """
    with _open(source, max_pixels) as container:
        stream = container.streams.video[0]
        segments = _Segments(target, key)
        index = segments.open(needs_scores=smooth > 0)
        average = ScoreAverage(smooth)
        if smooth and index:
            average.scores = torch.from_numpy(np.load(segments.scores(index - 1))).to(predictor.device)
        frames = _frames(container, source)
        skipped = done = sum(1 for _ in islice(frames, index * SEGMENT_FRAMES))
        background = background_class(classes)
        colors = [None if k == background else color for k, color in enumerate(palette)]
        while (first := next(frames, None)) is not None:
            legend = np.asarray(draw_legend(list(zip(classes, colors, strict=True)), first.pixels.shape[1]))
            with segments.write(index, stream.time_base or Fraction(1, 90_000)) as add:
                for frame in chain([first], islice(frames, SEGMENT_FRAMES - 1)):
                    labels = average.labels(predictor, frame.pixels)
                    pixels = frame.pixels.permute(1, 2, 0).numpy()
                    add(_beside(overlay(pixels, labels, palette, background=background), legend), frame.duration)
                    done += 1
                    progress(done, stream.frames or None)
                if average.scores is not None:
                    with atomic_write(segments.scores(index)) as file:
                        np.save(file, average.scores.cpu().numpy())
            segments.scores(index - 1).unlink(missing_ok=True)
            index += 1
    if not done:
        raise BadFileError(f"{source}: no frame can be read; expected a video; {ADVICE}")
    segments.join(index)
    return VideoSummary(done, done - skipped)


class _Segments:
    """Finished segments of an overlay video, and the moving average of the scores after the last one."""

    def __init__(self, target: Path, key: str) -> None:
        unique = hashlib.sha256(f"{key} {_av().__version__}".encode()).hexdigest()[:12]
        self.target = target
        self.directory = target.with_name(f".{target.stem}.{unique}.segments")

    def open(self, *, needs_scores: bool) -> int:
        """Create the directory, delete the directories of other keys, and return the number of finished segments."""
        for other in self.directory.parent.glob(f".{glob.escape(self.target.stem)}.{'[0-9a-f]' * 12}.segments"):
            if other != self.directory:
                shutil.rmtree(other)
        self.directory.mkdir(parents=True, exist_ok=True)
        finished = next(k for k in count() if not self.path(k).exists())
        return 0 if needs_scores and finished and not self.scores(finished - 1).exists() else finished

    def path(self, index: int) -> Path:
        """Return the file of a segment."""
        return self.directory / f"{index:06d}.mp4"

    def scores(self, index: int) -> Path:
        """Return the file of the moving average after a segment."""
        return self.directory / f"{index:06d}.npy"

    @contextmanager
    def write(self, index: int, time_base: Fraction) -> Iterator[Callable[[NDArray[np.uint8], Fraction], None]]:
        """Yield a function that adds a frame (H, W, 3) with its duration in seconds, a multiple of the time base."""
        with atomic_write(self.path(index)) as temporary, _av().open(f"file:{temporary}", "w") as container:
            stream = container.add_stream(ENCODER, options=ENCODER_OPTIONS)
            stream.pix_fmt = "yuv420p"
            stream.codec_context.time_base = time_base
            durations: dict[int, int] = {}  # by time, both in units of the time base
            end = 0

            def mux(packets: "Iterable[av.Packet[Any]]") -> None:
                for packet in packets:
                    packet.duration = durations.pop(packet.pts or 0)
                    container.mux(packet)

            def add(pixels: NDArray[np.uint8], duration: Fraction) -> None:
                nonlocal end
                frame = _av().VideoFrame.from_ndarray(pixels, format="rgb24")
                if not end:
                    stream.width, stream.height = frame.width, frame.height
                frame.pts, frame.time_base = end, time_base
                durations[end] = int(duration / time_base)
                end += durations[end]
                mux(stream.encode(frame))

            yield add
            mux(stream.encode())

    def join(self, number: int) -> None:
        """Write the packets of all segments into the overlay video, and delete the segments."""
        options = {"movflags": "faststart"}  # players can start before the whole file is loaded
        with (
            atomic_write(self.target) as temporary,
            _av().open(f"file:{temporary}", "w", container_options=options) as container,
        ):
            stream, end = None, Fraction(0)
            for index in range(number):
                with _av().open(f"file:{self.path(index)}") as segment:
                    source = segment.streams.video[0]
                    stream = stream or container.add_stream_from_template(source)
                    assert source.time_base is not None
                    for packet in segment.demux(source):
                        if packet.size:  # an empty packet ends the segment
                            packet.stream = stream
                            packet.pts = packet.dts = int(end / source.time_base)
                            end += (packet.duration or 0) * source.time_base
                            container.mux(packet)
        shutil.rmtree(self.directory)


def _beside(image: NDArray[np.uint8], legend: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image and its legend side by side, padded to an even height and width as H.264 needs."""
    height, width = max(image.shape[0], legend.shape[0]), image.shape[1] + legend.shape[1]
    canvas = np.full((height + height % 2, width + width % 2, 3), 255, dtype=np.uint8)
    canvas[: image.shape[0], : image.shape[1]] = image
    canvas[: legend.shape[0], image.shape[1] : width] = legend
    return canvas


@contextmanager
def _open(path: Path, max_pixels: int) -> "Iterator[InputContainer]":
    """Open a video. Only the file itself is read, and its size is checked before any frame is decoded."""
    av = _av()
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            container = stack.enter_context(av.open(file, container_options={"format_whitelist": FORMATS}))
            stream = container.streams.video[0]
        except IndexError as error:
            raise BadFileError(f"{path}: no video stream; expected a video; {ADVICE}") from error
        except (av.FFmpegError, OSError) as error:
            raise BadFileError(f"{path}: cannot be read as a video ({error.strerror}); {ADVICE}") from error
        if stream.width * stream.height > max_pixels:
            raise BadFileError(
                f"{path}: {stream.width} x {stream.height} pixels; expected at most {max_pixels:,}; resize the video, "
                "or raise the limit"
            )
        stream.thread_type = "AUTO"
        yield container


def _frames(container: "InputContainer", path: Path) -> Iterator[Frame]:
    """Yield the frames of an open video. The duration of a frame is the time until the next one."""
    stream = container.streams.video[0]
    unit = stream.time_base or Fraction(1, 90_000)
    usual = max(1, round(1 / (stream.average_rate or 25) / unit))
    before: tuple[Tensor, int, int] | None = None  # pixels, time and stated duration of the previous frame
    for frame in _decoded(container, path):
        pixels = torch.from_numpy(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90).copy())
        pixels = pixels.permute(2, 0, 1)
        time = frame.pts if frame.pts is not None else 0 if before is None else before[1] + before[2]
        if before is not None:
            if pixels.shape != before[0].shape:
                raise BadFileError(f"{path}: the size of the frames changes; expected frames of one size; {ADVICE}")
            yield Frame(before[0], max(1, time - before[1]) * unit)
        before = pixels, time, frame.duration or usual
    if before is None:
        return
    end = (before[1] + before[2] - (stream.start_time or 0)) * unit
    expected = None
    if stream.duration is not None:
        expected = stream.duration * unit
    elif container.duration is not None and len(container.streams) == 1:
        expected = Fraction(container.duration, 1_000_000)
    if expected is not None and end < expected - MISSING_S:
        raise BadFileError(
            f"{path}: ends after {float(end):.1f} of {float(expected):.1f} seconds, because the file is damaged; "
            f"{ADVICE}"
        )
    yield Frame(before[0], before[2] * unit)


def _decoded(container: "InputContainer", path: Path) -> "Iterator[av.VideoFrame]":
    """Yield decoded frames; a damaged one raises BadFileError."""
    frames = container.decode(container.streams.video[0])
    for index in count():
        try:
            frame = next(frames, None)
        except (_av().FFmpegError, OSError) as error:
            raise BadFileError(f"{path}: frame {index} is damaged ({error.strerror}); {ADVICE}") from error
        if frame is None:
            return
        if frame.is_corrupt:
            raise BadFileError(f"{path}: frame {index} is damaged; {ADVICE}")
        yield frame


def _av() -> ModuleType:
    """Import PyAV, which the extra `video` installs."""
    try:
        import av
    except ImportError as error:
        raise CaasegError("videos need PyAV; install it with: pip install 'caaseg[video]'") from error
    return av
