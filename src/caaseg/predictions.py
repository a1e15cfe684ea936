"""Prediction of many images into a directory. It can be interrupted, repeated, and shared by several processes.

    OUT/labels/NAME.png          class ids, with the palette
    OUT/overlays/NAME.jpg        the image blended with the colors of its labels
    OUT/probabilities/NAME.npy   if requested: float16 (H, W, K)
    OUT/predict.json             model and options

All have the size of the image after its EXIF rotation. Labels are written last, with the size and the modification time
of the image file: an image with labels whose file did not change is done.
"""

import errno
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import caaseg
from caaseg.data.decode import MAX_PIXELS, read_image
from caaseg.data.inputs import InputImage
from caaseg.data.sample import BadFileError
from caaseg.drawing.label_files import ProbabilityFile, exceeds_jpeg_limit, read_note, save_labels, save_overlay
from caaseg.errors import CaasegError
from caaseg.files import atomic_write, lock_name, remove_stale_temporaries
from caaseg.models.inference import LoadedModel, is_out_of_memory
from caaseg.models.predictor import Average, Precision, Predictor
from caaseg.models.windows import Size, is_tiled, labels_from_parts

RECORD = "predict.json"
OUTPUT_DIRECTORIES = ("labels", "overlays", "probabilities")
WINDOW = (513, 513)
"""Window of images that are too large to be predicted whole: the default training crop."""
MAX_WHOLE_PIXELS = 2048 * 2048
"""Larger images are tiled. With more than FEW_CLASSES classes the limit is proportionally lower."""
FEW_CLASSES = 32
FATAL_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors in writing that the next image would raise too."""


@dataclass(frozen=True, kw_only=True)
class ImageOutcome:
    """Result of one image: labels, or an error message."""

    image: str
    """Path as given, or as found in a given directory."""
    labels: str | None = None
    """Path of the labels; None if there is an error message."""
    message: str | None = None
    """Error message."""
    there_already: bool = False
    """Whether the results existed before, and nothing was done."""
    size: Size | None = None
    """Height and width after the EXIF rotation."""
    windowed: bool = False
    """Whether the image was tiled."""
    grid_disagreement: float | None = None
    """Share of pixels whose class changes with a shifted grid of windows; None if not requested or not tiled."""
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options that change the predictions of a model."""

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: Size | None = None
    """None predicts images whole, and tiles large ones with WINDOW."""
    average: Average = "logits"
    precision: Precision = "32"


@dataclass(frozen=True, kw_only=True)
class PredictTask:
    """What to do with every image."""

    model: LoadedModel
    options: PredictOptions
    out: Path
    """Output directory; results of another model or other options in it are an error."""
    probabilities: bool = False
    """Save probabilities too."""
    compare_grids: bool = False
    """Predict tiled images again with a shifted grid of windows, and report the share of pixels that change."""
    max_pixels: int = MAX_PIXELS
    """Larger images are rejected."""

    def predictor(self) -> Predictor:
        """Return the predictor of an image, or of a window of it."""
        options = self.options
        return Predictor(
            self.model.network,
            scales=options.scales,
            flip=options.flip,
            average=options.average,
            precision=options.precision,
        )

    def window(self, size: Size) -> Size:
        """Return the window for an image of this size; its own size if it is predicted whole."""
        fits = size[0] * size[1] * max(FEW_CLASSES, self.model.num_classes) <= MAX_WHOLE_PIXELS * FEW_CLASSES
        return self.options.window or (size if fits else WINDOW)


def predict_images(
    task: PredictTask,
    images: Sequence[InputImage],
    *,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> list[ImageOutcome]:
    """Predict images into a directory. An image that fails gets an error message, and the next one is predicted.

    Args:
        task: what to do.
        images: image files, and the names of their results.
        share: rank of this process and number of processes that split the list.
        progress: called with "images", the number of images done, and the total.
    """
    predictor = task.predictor()
    rank, ranks = share
    remaining = list(images[rank::ranks])
    total = len(remaining)
    outcomes: list[ImageOutcome] = []
    task.out.mkdir(parents=True, exist_ok=True)
    with lock_name(task.out, RECORD, wait=True):
        _write_record(task)
    for wait in (False, True):  # first skip images that another process holds, then wait for those
        skipped: list[InputImage] = []
        for image in remaining:
            with lock_name(task.out, str(image.name), wait=wait) as locked:
                if locked:
                    outcomes.append(_predict_or_explain(task, predictor, image))
                    progress("images", len(outcomes), total)
                else:
                    skipped.append(image)
        remaining = skipped
    return outcomes


def summary(outcomes: Sequence[ImageOutcome], left_out: int, out: Path) -> list[str]:
    """Return the lines that the command prints about all images."""
    done = [outcome for outcome in outcomes if outcome.message is None]
    already = sum(outcome.there_already for outcome in done)
    lines = [f"{len(done) - already} predicted, {already} there already, {len(outcomes) - len(done)} failed: {out}"]
    if left_out:
        lines.append(f"left out, because they do not end as images do: {left_out}")
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


def _write_record(task: PredictTask) -> None:
    """Write predict.json; raise an error if the directory holds results of another model or other options."""
    path, model = task.out / RECORD, task.model
    made_by = {"model": model.digest, "classes": model.classes, "palette": model.palette, **asdict(task.options)}
    wanted = json.loads(json.dumps(made_by))
    if path.exists():
        try:
            found = json.loads(path.read_text())["made_by"]
            different = [name for name in wanted if found[name] != wanted[name]]
        except (ValueError, KeyError, TypeError) as error:
            raise CaasegError(
                f"{path}: not a record of predictions; expected the file that caaseg predict writes; use another --out"
            ) from error
        if not different:
            return
        if any(result.is_file() and result != path and result.name[0] != "." for result in task.out.rglob("*")):
            raise CaasegError(
                f"{path.parent}: has predictions with a different {' and a different '.join(different)}; "
                "use another --out, or delete that directory"
            )
    remove_stale_temporaries(path)
    with atomic_write(path) as file:
        file.write_text(json.dumps({"caaseg": caaseg.__version__, "made_by": made_by}, indent=1) + "\n")


def _predict_or_explain(task: PredictTask, predictor: Predictor, image: InputImage) -> ImageOutcome:
    """Return the outcome of an image; errors that concern this image only become its message."""
    path = image.path
    try:
        return _existing_outcome(task, image) or _predict(task, predictor, image)
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


def _existing_outcome(task: PredictTask, image: InputImage) -> ImageOutcome | None:
    """Return the outcome of an image whose requested results all exist, made from the file as it is; else None."""
    paths = _output_paths(task.out, image.name)
    note = _read_note(paths)
    done = (
        _fingerprint(image.path).items() <= note.items()
        and any(path.exists() for path in paths.overlays)
        and (paths.probabilities.exists() or not task.probabilities)
        and ("grid_disagreement" in note or not task.compare_grids)
    )
    if not done:
        return None
    disagreement = note["grid_disagreement"] if task.compare_grids else None
    return ImageOutcome(
        image=str(image.path), labels=str(paths.labels), there_already=True, grid_disagreement=disagreement
    )


def _read_note(paths: "OutputPaths") -> dict[str, Any]:
    """Return the note in a label file; empty if there is none."""
    try:
        note = json.loads(read_note(paths.labels) or "{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _predict(task: PredictTask, predictor: Predictor, image: InputImage) -> ImageOutcome:
    start = time.perf_counter()
    paths, model = _output_paths(task.out, image.name), task.model
    note = _fingerprint(image.path)
    pixels = read_image(image.path, max_pixels=task.max_pixels)
    size = (pixels.shape[1], pixels.shape[2])
    window = task.window(size)
    before = _read_note(paths)
    outdated = [paths.labels, *paths.overlays]
    if note.items() <= before.items():  # the file did not change: results that are not requested now stay valid
        note |= before
    if task.probabilities or note != before:
        outdated.append(paths.probabilities)
    for path in outdated:
        path.unlink(missing_ok=True)
    for path in (paths.labels, *paths.overlays, paths.probabilities):
        remove_stale_temporaries(path)  # safe, because this process holds the image's lock

    labels = np.empty(size, dtype=np.uint8)
    with ExitStack() as stack:
        file = None
        if task.probabilities:
            file = stack.enter_context(ProbabilityFile(paths.probabilities, size, model.num_classes))
        for rows, columns, scores in predictor.parts(pixels, window):
            labels[rows, columns] = scores.argmax(0).to(torch.uint8).cpu().numpy()
            if file is not None:
                file.write(rows, columns, scores if task.options.average == "probabilities" else scores.softmax(0))
    disagreement = None
    if task.compare_grids:
        if is_tiled(size, window):
            shifted = labels_from_parts(predictor.parts(pixels, window, shifted=True), size)
            disagreement = float((shifted.numpy() != labels).mean())
        note["grid_disagreement"] = disagreement
    save_overlay(pixels, labels, model.palette, paths.overlays[exceeds_jpeg_limit(size)])
    save_labels(labels, model.palette, paths.labels, json.dumps(note))
    return ImageOutcome(
        image=str(image.path),
        labels=str(paths.labels),
        size=size,
        windowed=is_tiled(size, window),
        grid_disagreement=disagreement,
        seconds=time.perf_counter() - start,
    )


class OutputPaths(NamedTuple):
    """Result files of an image."""

    labels: Path
    overlays: tuple[Path, Path]  # JPEG, or PNG if a side is too long for JPEG
    probabilities: Path


def _output_paths(out: Path, name: Path) -> OutputPaths:
    def path(directory: str, suffix: str) -> Path:
        parent = out / directory / name
        return parent.with_name(parent.name + suffix)  # not with_suffix: names may contain dots

    labels, overlays, probabilities = OUTPUT_DIRECTORIES
    overlay_paths = (path(overlays, ".jpg"), path(overlays, ".png"))
    return OutputPaths(path(labels, ".png"), overlay_paths, path(probabilities, ".npy"))


def _fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and modification time of a file, to detect that it changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}; expected an image") from error
    return {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}
