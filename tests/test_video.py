"""Overlay videos: frames, times and legend, killed and repeated calls, smoothing, and files that are not videos."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caaseg.cli import main
from caaseg.data.datasets.camvid import CamVid
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import BadFileError
from caaseg.drawing.overlays import overlay
from caaseg.models.predictor import Predictor
from caaseg.video import SEGMENT_FRAMES, VideoSummary, predict_frames, read_frames, write_overlay_video
from tests.small_models import pointwise_model, random_images, scene, varied_model

av = pytest.importorskip("av", reason="PyAV is not installed")

from tests.clips import read_clip, write_clip  # noqa: E402

CLASSES = ("background", "road", "tree", "sky", "car")
PALETTE = distinct_colors(len(CLASSES))
CAMVID = Path(__file__).parents[2] / "shared" / "data" / "camvid"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write(source: Path, target: Path, **options: Any) -> VideoSummary:
    predictor = Predictor(pointwise_model(len(CLASSES)))
    return write_overlay_video(
        predictor, source, target, classes=CLASSES, palette=PALETTE, **{"key": "a key", **options}
    )


def test_the_overlay_video_has_the_frames_times_and_length_of_the_video(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", 7, durations=(40, 25, 130))
    assert write(tmp_path / "clip.mp4", tmp_path / "out.mp4") == (7, 7)
    before, after = read_clip(tmp_path / "clip.mp4"), read_clip(tmp_path / "out.mp4")
    assert (after.codec, after.pixel_format) == ("h264", "yuv420p")
    assert len(after.frames) == 7
    assert after.times == before.times
    assert after.duration == before.duration == Fraction(430, 1000)
    assert not list(tmp_path.glob(".*"))

    predictor = Predictor(pointwise_model(len(CLASSES)))
    for image, drawn in zip(before.frames, after.frames, strict=True):
        expected = overlay(image, predictor(image), PALETTE, background=0)
        shown = drawn[:32, :48].astype(int)
        assert np.abs(shown - expected).mean() < 12  # lossy


def test_the_legend_has_the_color_of_each_class(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", 1, size=(120, 80))
    write(tmp_path / "clip.mp4", tmp_path / "out.mp4")
    legend = read_clip(tmp_path / "out.mp4").frames[0][:, 80:].astype(int)
    line = 12
    for k, color in enumerate([(255, 255, 255), *PALETTE[1:]]):  # the background is transparent
        middle = legend[line // 2 + k * line + 4, line // 2 + 4]
        assert np.abs(middle - color).max() < 40, CLASSES[k]


@pytest.mark.parametrize("smooth", [0.0, 0.6])
def test_a_killed_call_that_is_repeated_writes_the_same_video(tmp_path: Path, smooth: float) -> None:
    number = 2 * SEGMENT_FRAMES + 20
    write_clip(tmp_path / "clip.mp4", number, size=(16, 16))
    assert write(tmp_path / "clip.mp4", tmp_path / "once.mp4", smooth=smooth) == (number, number)

    def stop(done: int, total: int | None) -> None:
        assert total == number
        if done == SEGMENT_FRAMES + 20:
            raise KeyboardInterrupt

    twice = tmp_path / "twice.mp4"
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "clip.mp4", twice, smooth=smooth, progress=stop)
    assert not twice.exists()
    assert write(tmp_path / "clip.mp4", twice, smooth=smooth) == (number, number - SEGMENT_FRAMES)
    expected, found = read_clip(tmp_path / "once.mp4"), read_clip(twice)
    assert (found.times, found.duration) == (expected.times, expected.duration)
    difference = np.stack(found.frames).astype(int) - np.stack(expected.frames)
    assert np.abs(difference).mean((1, 2, 3)).max() < 3  # the encoder does not always write the same bytes
    assert not list(tmp_path.glob(".*"))


def test_segments_of_another_model_or_video_are_not_used(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", SEGMENT_FRAMES + 2, size=(16, 16))

    def stop(done: int, total: int | None) -> None:
        if done == SEGMENT_FRAMES + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "clip.mp4", tmp_path / "out.mp4", progress=stop)
    assert write(tmp_path / "clip.mp4", tmp_path / "out.mp4", key="another key").predicted == SEGMENT_FRAMES + 2
    assert not list(tmp_path.glob(".*"))


def test_scores_are_averaged_over_frames(tmp_path: Path) -> None:
    frames = random_images(3, 8, 8)
    predictor = Predictor(pointwise_model())
    first, second, third = (predictor.scores(frame[None])[0] for frame in frames)
    average = 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third
    *_, last = predict_frames(predictor, frames, smooth=0.75)
    assert np.array_equal(last, average.argmax(0).numpy())
    assert not np.array_equal(last, third.argmax(0).numpy())
    for frame, labels in zip(frames, predict_frames(predictor, frames), strict=True):
        assert np.array_equal(labels, predictor(frame))


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv", "avi"])
def test_frames_of_several_containers_are_read(tmp_path: Path, suffix: str) -> None:
    write_clip(tmp_path / f"clip.{suffix}", 5)
    frames = list(read_frames(tmp_path / f"clip.{suffix}"))
    assert [frame.pixels.shape for frame in frames] == [(3, 32, 48)] * 5
    assert all(frame.duration > 0 for frame in frames)


def test_rotated_videos_are_upright(tmp_path: Path) -> None:
    write_clip(tmp_path / "plain.mp4", 1)
    write_clip(tmp_path / "turned.mp4", 1, turned=90)
    (plain,), (turned,) = (list(read_frames(tmp_path / name)) for name in ("plain.mp4", "turned.mp4"))
    assert torch.equal(turned.pixels, plain.pixels.rot90(1, (1, 2)))


def test_files_that_are_not_videos_or_damaged_get_one_message(tmp_path: Path) -> None:
    write_clip(tmp_path / "good.mp4", 80)
    write_clip(tmp_path / "fast.mp4", 80, faststart=True)
    write_clip(tmp_path / "good.mkv", 80)
    good, fast, other = ((tmp_path / name).read_bytes() for name in ("good.mp4", "fast.mp4", "good.mkv"))
    damaged = bytearray(good)
    damaged[2000:2100] = bytes(100)
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n"
    for content, message in (
        (b"some text", "cannot be read as a video"),
        (b"", "cannot be read as a video"),
        (playlist, "cannot be read as a video"),
        (good[:3000], "cannot be read as a video"),
        (fast[: 2 * len(fast) // 3], "is damaged"),
        (bytes(damaged), "is damaged"),
        (other[: len(other) // 2], "of 3.2 seconds, because the file is damaged"),
    ):
        (tmp_path / "bad.mp4").write_bytes(content)
        with pytest.raises(BadFileError, match=message) as error:
            list(read_frames(tmp_path / "bad.mp4"))
        assert str(error.value).startswith(f"{tmp_path / 'bad.mp4'}: ")
        assert str(error.value).endswith("replace the file, or convert it to MP4")
    with pytest.raises(BadFileError, match="48 x 32 pixels; expected at most 1,000"):
        next(read_frames(tmp_path / "good.mp4", max_pixels=1000))


def test_the_command_predicts_images_and_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    varied_model(3).save_pretrained(tmp_path / "model")
    Path("in").mkdir()
    write_clip(tmp_path / "in/street.mp4", 3, size=(72, 96))
    (tmp_path / "in/text.mov").write_text("not a video")
    av.VideoFrame.from_ndarray(scene(0).permute(1, 2, 0).numpy().copy(), format="rgb24").to_image().save("in/a.png")
    arguments = ["predict", "model", "in", "--out", "out", "--device", "cpu", "--json", "out.json"]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("2 predicted, 0 already done, 1 failed: out\nin/street.mp4: 3 frames, ")
    assert "frames per second: out/overlays/street.mp4\n" in captured.out
    assert captured.err == (
        "caaseg: in/text.mov: cannot be read as a video (Invalid data found when processing input); replace the file, "
        "or convert it to MP4\n"
    )
    assert len(read_clip(tmp_path / "out/overlays/street.mp4").frames) == 3
    outcomes = {found["image"]: found for found in json.loads(Path("out.json").read_text())["images"]}
    assert outcomes["in/street.mp4"]["video"] == "out/overlays/street.mp4"
    assert outcomes["in/street.mp4"]["frames"] == 3
    assert outcomes["in/street.mp4"]["frames_per_second"] > 0

    (tmp_path / "in/text.mov").unlink()
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("0 predicted, 2 already done, 0 failed: out\n")
    Path("out/overlays/street.mp4").write_bytes(b"damaged")
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("1 predicted, 1 already done")
    assert main([*arguments, "--smooth", "0.5"]) == 2
    assert "out: has predictions with smooth 0.0, not 0.5; use another --out" in capsys.readouterr().err
    assert main([*arguments[:-2], "--probabilities"]) == 0  # of the image; the video is already done


def test_a_video_of_the_user_in_the_output_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    varied_model(3).save_pretrained(tmp_path / "model")
    for name in ("one.mp4", "two.mp4"):
        write_clip(tmp_path / name, 1)
    assert main(["predict", "model", "one.mp4", "--out", "out", "--device", "cpu"]) == 0
    shutil.copy("two.mp4", "out/overlays/two.mp4")
    assert main(["predict", "model", "two.mp4", "--out", "out", "--device", "cpu"]) == 2
    assert "out/overlays/two.mp4: exists, and caaseg predict did not write it" in capsys.readouterr().err
    assert Path("out/overlays/two.mp4").read_bytes() == Path("two.mp4").read_bytes()
    assert main(["predict", "model", "one.mp4", "--out", "other", "--device", "cpu", "--compare-grids"]) == 2
    assert "one.mp4: --compare-grids does not apply to videos" in capsys.readouterr().err


def camvid_clip(path: Path, number: int) -> None:
    """Write frames of CamVid's test split at 15 frames per second."""
    data = CamVid(CAMVID, "test")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=15)
        stream.height, stream.width = data[0].image.shape[1:]
        for k in range(number):
            pixels = np.ascontiguousarray(data[k].image.permute(1, 2, 0).numpy())
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.slow
@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_clip_killed_half_way_and_repeated_is_complete_and_plays_in_a_browser(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    camvid_clip(tmp_path / "clip.mp4", 150)
    command = [sys.executable, "-m", "caaseg", "predict", "camvid", "clip.mp4", "--out", "out", "--size", "180"]
    with subprocess.Popen(command, cwd=tmp_path) as child:
        while len(list(tmp_path.glob("out/overlays/.*.segments/[0-9]*.mp4"))) < 1:
            assert child.poll() is None
            time.sleep(0.1)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "out/overlays/clip.mp4").exists()
    subprocess.run(command, cwd=tmp_path, check=True)
    before, after = read_clip(tmp_path / "clip.mp4"), read_clip(tmp_path / "out/overlays/clip.mp4")
    assert len(after.frames) == 150
    assert after.times == before.times
    assert after.duration == before.duration == 10
    assert [path.name for path in (tmp_path / "out/overlays").iterdir()] == ["clip.mp4"]

    (tmp_path / "page.html").write_text('<video src="out/overlays/clip.mp4" muted></video>')
    with sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox
        browser = driver.chromium.launch(executable_path=BROWSER, args=options)
        page = browser.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.locator("video").evaluate("video => { video.playbackRate = 8; return video.play(); }")
        page.wait_for_function("document.querySelector('video').ended", timeout=60_000)
        played = page.locator("video").evaluate("video => [video.readyState, video.duration, video.currentTime]")
        browser.close()
    assert played == [4, 10, 10]
