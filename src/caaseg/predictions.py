"""Prediction of images and videos into a directory. It can be interrupted, repeated, and shared by processes.

Results have the size of the image after its EXIF rotation. An image is skipped if the metadata in the output directory
shows that neither its file nor its results changed since its prediction.
"""

import ctypes
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from caaseg.data.decode import MAX_PIXELS, read_image
from caaseg.data.inputs import InputImage
from caaseg.data.sample import BadFileError
from caaseg.drawing.label_files import (
    ProbabilityFile,
    exceeds_jpeg_limit,
    save_labels,
    save_overlay,
    save_source_values,
)
from caaseg.errors import CaasegError
from caaseg.files import hash_files, lock_name
from caaseg.models.image_size import ImageSize
from caaseg.models.inference import LoadedModel, is_out_of_memory
from caaseg.models.predictor import Average, Precision, Predictor
from caaseg.models.windows import Size, labels_from_parts
from caaseg.prediction_directory import Metadata, PredictionDirectory, output_paths
from caaseg.video import is_video, write_overlay_video

FATAL_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors in writing that the next image would raise too."""


@dataclass(frozen=True, kw_only=True)
class ImageOutcome:
    """Result of one image or video: labels, an overlay video, or an error message."""

    image: str
    """Path as given, or as found in a given directory."""
    labels: str | None = None
    """Path of the labels; None for a video, and if there is an error message."""
    video: str | None = None
    """Path of the overlay video; None for an image, and if there is an error message."""
    message: str | None = None
    """Error message."""
    already_done: bool = False
    """Whether the results existed before, and nothing was done."""
    size: Size | None = None
    """Height and width after the EXIF rotation."""
    tiled: bool = False
    """Whether the image was tiled."""
    grid_disagreement: float | None = None
    """Share of pixels whose class changes with a shifted grid of windows; None if not requested or not tiled."""
    seconds: float | None = None
    frames: int | None = None
    """Number of frames of a video."""
    frames_per_second: float | None = None
    """Speed of the prediction of a video, without frames that were finished before."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options that change the predictions of a model."""

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: Size | None = None
    """None predicts images whole, except large ones, which are tiled."""
    size: ImageSize = "auto"
    average: Average = "logits"
    precision: Precision = "32"
    source_values: bool = False
    """Write labels with the values or colors of the training masks instead of class ids."""
    smooth: float = 0.0
    """Weight of the earlier frames of a video, see `predict_frames`."""
    legend: bool = False
    """Draw the names and colors of the classes right of overlays; videos always have them."""


@dataclass(frozen=True, kw_only=True)
class PredictTask:
    """Settings for the prediction of images."""

    model: LoadedModel
    options: PredictOptions
    out: Path
    """Output directory; results of another model or other options in it are an error, and so are other files."""
    probabilities: bool = False
    """Save probabilities too."""
    compare_grids: bool = False
    """Predict tiled images again with a shifted grid of windows, and report the share of pixels that change."""
    max_pixels: int = MAX_PIXELS
    """Larger images are rejected."""

    def __post_init__(self) -> None:
        if self.options.source_values and self.model.mask_values is None:
            raise CaasegError(
                f"{self.model.source}: the values of its training masks are unknown, because it was not trained on the "
                "dataset folder; leave out --source-values"
            )

    def predictor(self) -> Predictor:
        """Return the predictor of an image, or of a window of it."""
        options = self.options
        return Predictor(
            self.model.network,
            size=options.size,
            scales=options.scales,
            flip=options.flip,
            window=options.window,
            average=options.average,
            precision=options.precision,
        )

    def directory(self) -> PredictionDirectory:
        """Return the output directory for the model and the options."""
        model = self.model
        made_by = {"model_sha256": model.digest, "output_stride": model.output_stride, **asdict(self.options)}
        return PredictionDirectory(
            path=self.out, made_by=json.loads(json.dumps(made_by)), classes=model.classes, palette=model.palette
        )


def predict_images(
    task: PredictTask,
    images: Sequence[InputImage],
    *,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> list[ImageOutcome]:
    """Predict images into a directory. An image that fails gets an error message, and the next one is predicted.

    Args:
        task: model, options and output directory.
        images: image files, and the names of their results.
        share: rank of this process and number of processes that split the list.
        progress: called with "images", the number of images done, and the total; during a video also with its path,
            the number of frames done, and the total or None.
    """
    predictor, directory = task.predictor(), task.directory()
    rank, ranks = share
    remaining = list(images[rank::ranks])
    total = len(remaining)
    outcomes: list[ImageOutcome] = []
    directory.open(image.name for image in remaining)
    for wait in (False, True):  # first skip images that another process has locked, then wait for them
        skipped: list[InputImage] = []
        for image in remaining:
            # Not the name alone: an image predict.json.png would share the lock of predict.json.
            with lock_name(task.out, str(output_paths(image.name).metadata), wait=wait) as locked:
                if locked:
                    outcomes.append(_predict_or_explain(task, predictor, directory, image, progress))
                    progress("images", len(outcomes), total)
                    release_memory()
                else:
                    skipped.append(image)
        remaining = skipped
    return outcomes


def array_task() -> tuple[int, int]:
    """Return the index of this SLURM array task and the number of tasks, or (0, 1) outside of a job array."""
    if "SLURM_ARRAY_TASK_ID" not in os.environ:
        return 0, 1
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    task, count, first, last, step = (int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", "1")) for name in names)
    if last != first + (count - 1) * step:
        raise CaasegError(
            f"the SLURM job array has {count} tasks from {first} to {last}; expected tasks at equal intervals, because "
            "the images are divided among them; submit all of them, as in --array 0-99"
        )
    return (task - first) // step, count


def summary(outcomes: Sequence[ImageOutcome], left_out: int, out: Path) -> list[str]:
    """Return the lines that the command prints about all images."""
    done = [outcome for outcome in outcomes if outcome.message is None]
    already = sum(outcome.already_done for outcome in done)
    lines = [f"{len(done) - already} predicted, {already} already done, {len(outcomes) - len(done)} failed: {out}"]
    if left_out:
        lines.append(f"skipped files without the suffix of an image: {left_out}")
    lines += [
        f"{outcome.image}: {outcome.frames} frames, {outcome.frames_per_second:.1f} frames per second: {outcome.video}"
        for outcome in done
        if outcome.frames_per_second is not None
    ]
    lines += [
        f"{outcome.image}: {100 * outcome.grid_disagreement:.2f}% of the pixels get another class with a shifted grid"
        for outcome in done
        if outcome.grid_disagreement is not None
    ]
    return lines


def gather_outcomes(outcomes: list[ImageOutcome]) -> list[ImageOutcome]:
    """Return the outcomes of all processes that torchrun started, in each of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return outcomes
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, outcomes)
    return [outcome for part in parts for outcome in part]


def _predict_or_explain(
    task: PredictTask,
    predictor: Predictor,
    directory: PredictionDirectory,
    image: InputImage,
    progress: Callable[[str, int, int | None], None],
) -> ImageOutcome:
    """Return the outcome of an image; errors that concern this image only become its message."""
    path = image.path
    try:
        image_hash = _hash_image(image.path)
        before = directory.read(image.name)
        if before is not None and before.image_sha256 != image_hash:
            before = None
        if before is not None and _is_done(task, directory, image, before):
            return _existing_outcome(task, image, before)
        if is_video(path):
            return _predict_video(task, predictor, directory, image, image_hash, progress)
        return _predict(task, predictor, directory, image, image_hash, before)
    except BadFileError as error:
        message = str(error)
    except OSError as error:
        if error.errno in FATAL_WRITE_ERRORS:
            raise
        message = f"{path}: its results cannot be written ({error}); rename the file"
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            message = f"{path}: out of memory; use a smaller --window, fewer --scales, or --precision bf16"
        else:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"{path}: the model failed on it ({reason}); try another --window"
    return ImageOutcome(image=str(path), message=message)


def _is_done(task: PredictTask, directory: PredictionDirectory, image: InputImage, metadata: Metadata) -> bool:
    """Return whether all requested results exist, and are intact."""
    paths = output_paths(image.name)
    if is_video(image.path):
        return directory.is_intact(paths.video, metadata)
    return (
        directory.is_intact(paths.labels, metadata)
        and any(directory.is_intact(path, metadata) for path in paths.overlays)
        and (directory.is_intact(paths.probabilities, metadata) or not task.probabilities)
        and (metadata.grids_compared or not task.compare_grids)
    )


def _existing_outcome(task: PredictTask, image: InputImage, metadata: Metadata) -> ImageOutcome:
    paths, found = output_paths(image.name), is_video(image.path)
    return ImageOutcome(
        image=str(image.path),
        labels=None if found else str(task.out / paths.labels),
        video=str(task.out / paths.video) if found else None,
        already_done=True,
        grid_disagreement=metadata.grid_disagreement if task.compare_grids else None,
    )


def _predict(
    task: PredictTask,
    predictor: Predictor,
    directory: PredictionDirectory,
    image: InputImage,
    image_hash: str,
    before: Metadata | None,
) -> ImageOutcome:
    """Predict an image and write its results.

    Args:
        task: model, options and output directory.
        predictor: the task's predictor.
        directory: the task's output directory.
        image: the image; the caller holds its lock.
        image_hash: SHA-256 of the image file.
        before: metadata of earlier results of the same image file; they stay listed if they are not requested now.
    """
    start = time.perf_counter()
    model, paths = task.model, output_paths(image.name)
    pixels = read_image(image.path, max_pixels=task.max_pixels)
    size = (pixels.shape[1], pixels.shape[2])
    overlay = paths.overlays[exceeds_jpeg_limit(size)]
    origin = {
        "image": str(image.path),
        "image_sha256": image_hash,
        "model": model.source,
        "model_sha256": model.digest,
    }
    earlier = {path: found for path, found in before.results.items() if found} if before is not None else {}
    new = [paths.labels, overlay, *([paths.probabilities] if task.probabilities else [])]
    metadata = Metadata(
        **origin,
        results=earlier | {str(path): None for path in new},
        grids_compared=before is not None and before.grids_compared,
        grid_disagreement=before.grid_disagreement if before is not None else None,
    )
    directory.begin(image.name, metadata)

    labels = np.empty(size, dtype=np.uint8)
    with ExitStack() as stack:
        file = None
        if task.probabilities:
            file = stack.enter_context(ProbabilityFile(task.out / paths.probabilities, size, model.num_classes))
        for rows, columns, scores in predictor.parts(pixels):
            labels[rows, columns] = scores.max(0).indices.to(torch.uint8).cpu().numpy()
            if file is not None:
                file.write(rows, columns, scores if task.options.average == "probabilities" else scores.softmax(0))
    disagreement = None
    if task.compare_grids:
        if predictor.is_tiled(size):
            shifted = labels_from_parts(predictor.parts(pixels, shifted=True), size)
            disagreement = float((shifted.numpy() != labels).mean())
        metadata = replace(metadata, grids_compared=True, grid_disagreement=disagreement)
    save_overlay(pixels, labels, model.palette, task.out / overlay, model.classes, legend=task.options.legend)
    if task.options.source_values and model.mask_values is not None:
        save_source_values(labels, model.mask_values, task.out / paths.labels, json.dumps(origin))
    else:
        save_labels(labels, model.palette, task.out / paths.labels, json.dumps(origin))
    directory.finish(image.name, metadata)
    return ImageOutcome(
        image=str(image.path),
        labels=str(task.out / paths.labels),
        size=size,
        tiled=predictor.is_tiled(size),
        grid_disagreement=disagreement,
        seconds=time.perf_counter() - start,
    )


def _predict_video(
    task: PredictTask,
    predictor: Predictor,
    directory: PredictionDirectory,
    video: InputImage,
    video_hash: str,
    progress: Callable[[str, int, int | None], None],
) -> ImageOutcome:
    """Predict the frames of a video and write the overlay video. The caller holds the lock of the video."""
    options = {
        "--probabilities": task.probabilities,
        "--compare-grids": task.compare_grids,
        "--source-values": task.options.source_values,
    }
    for option, is_set in options.items():
        if is_set:
            raise BadFileError(f"{video.path}: {option} does not apply to videos; leave it out, or leave out the video")
    start = time.perf_counter()
    model, path = task.model, output_paths(video.name).video
    metadata = Metadata(
        image=str(video.path),
        image_sha256=video_hash,
        model=model.source,
        model_sha256=model.digest,
        results={str(path): None},
    )
    directory.begin(video.name, metadata)
    written = write_overlay_video(
        predictor,
        video.path,
        task.out / path,
        classes=model.classes or [str(k) for k in range(model.num_classes)],
        palette=model.palette,
        key=json.dumps([video_hash, directory.made_by]),
        smooth=task.options.smooth,
        max_pixels=task.max_pixels,
        progress=lambda done, total: progress(str(video.path), done, total),
    )
    directory.finish(video.name, metadata)
    seconds = time.perf_counter() - start
    return ImageOutcome(
        image=str(video.path),
        video=str(task.out / path),
        seconds=seconds,
        frames=written.frames,
        frames_per_second=written.predicted / seconds,
    )


def release_memory() -> None:
    """Return freed memory to the operating system. glibc would keep it, in blocks too small for larger images."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # other C libraries have no such function
            ctypes.CDLL(None).malloc_trim(0)


def _hash_image(path: Path) -> str:
    """Return the SHA-256 of an image file."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise BadFileError(f"{path}: not a regular file; expected an image")
        return hash_files(path)
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}; expected an image") from error
