"""Many pictures predicted into a folder: once each, whatever is interrupted, repeated or run side by side.

    OUT/labels/NAME.png          class ids, with the palette
    OUT/overlays/NAME.jpg        the picture under the colors of its labels
    OUT/probabilities/NAME.npy   where asked for: float16 (H, W, K)
    OUT/predict.json             what made them

All have the size of the picture as a viewer shows it: turned as its EXIF entry says. Labels are written last, with a
note of the file they were made from: a picture whose labels are there and whose file did not change is done.
"""

import errno
import hashlib
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
from torch import nn

import caaseg
from caaseg.benchmarks.timing import is_out_of_memory
from caaseg.claims import Claims
from caaseg.config import OutputStride
from caaseg.data.decode import MAX_PIXELS, read_image
from caaseg.data.inputs import Picture
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import BadFileError, Color
from caaseg.drawing.label_files import ProbabilityFile, exceeds_jpeg_limit, read_note, save_labels, save_overlay
from caaseg.files import atomic_write, remove_stale_temporaries
from caaseg.models import load_model, with_output_stride
from caaseg.models.cuda_graphs import CapturedModel
from caaseg.models.folding import compile_for_inference, fold_batch_norm
from caaseg.models.onnx import ONNX_SUFFIX, OnnxModel
from caaseg.models.predictor import Average, Precision, Predictor, Size
from caaseg.models.windows import blended_parts, grid_disagreement, is_cut

RECORD = "predict.json"
FOLDERS = ("labels", "overlays", "probabilities")
WINDOW = (513, 513)
"""Of pictures too large to be seen at once: the crop that recipes train with, unless they say otherwise."""
WHOLE_PIXELS = 2048 * 2048
"""Larger pictures are cut into windows; with more than FEW_CLASSES in proportion smaller ones, for their scores."""
FEW_CLASSES = 32
OF_ALL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Faults in writing that are not one picture's: the next would meet them too."""


class Subject(NamedTuple):
    """A model with what its results are drawn by."""

    network: nn.Module
    num_classes: int
    classes: tuple[str, ...] | None
    palette: tuple[Color, ...]
    digest: str  # of all that decides what it says


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one picture: results, or a message."""

    image: str
    """Its path as it was given, or found below what was given."""
    labels: str | None = None
    """Where they are; None where there is a message instead."""
    message: str | None = None
    """Why there are none."""
    there_already: bool = False
    """Whether they were there before, and nothing was done."""
    size: Size | None = None
    """Height and width, upright."""
    windowed: bool = False
    """Whether it was cut into windows."""
    grid_disagreement: float | None = None
    """Share of pixels that another grid of windows gives another class; None unless asked for, and for whole ones."""
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How pictures are predicted: what makes results of the same model differ."""

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: Size | None = None
    """None: large pictures in windows of WINDOW, others whole."""
    average: Average = "logits"
    precision: Precision = "32"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to do with every picture."""

    subject: Subject
    manner: Manner
    out: Path
    """Folder for the results; what was made there with another model or in another manner is an error."""
    probabilities: bool = False
    """Keep these too."""
    compare_grids: bool = False
    """Predict pictures that are cut once more, with another grid of windows, and tell how far the two differ."""
    max_pixels: int = MAX_PIXELS
    """Larger pictures are refused."""

    def predictor(self) -> Predictor:
        """What sees a picture, or a window of one. A CPU gains nothing by several at once, but needs memory."""
        predictor = Predictor(
            self.subject.network,
            scales=self.manner.scales,
            flip=self.manner.flip,
            average=self.manner.average,
            precision=self.manner.precision,
            batch_size=1,
        )
        if predictor.device.type == "cuda":
            predictor.batch_size = 8
        return predictor

    def window(self, size: Size) -> Size:
        """In what windows a picture of this size is seen; its own size where it is seen at once."""
        num_classes = self.subject.num_classes
        whole = size[0] * size[1] * max(FEW_CLASSES, num_classes) <= WHOLE_PIXELS * FEW_CLASSES
        return self.manner.window or (size if whole else WINDOW)


def open_subject(
    model: str,
    *,
    output_stride: OutputStride | None = None,
    precision: Precision = "32",
    compiled: bool = False,
    device: torch.device | str = "cpu",
) -> Subject:
    """A model from a run's folder, a saved model's folder, the hub, or an exported .onnx file."""
    if model.lower().endswith(ONNX_SUFFIX):
        given = {"--output-stride": output_stride is not None, "--compiled": compiled}
        given[f"--precision {precision}"] = precision != "32"
        if any(given.values()):
            option = next(name for name in given if given[name])
            raise ValueError(f"{model}: what it computes was fixed when it was exported; leave {option} out")
        exported = OnnxModel(Path(model), device=device)
        digest = hashlib.sha256(Path(model).read_bytes()).hexdigest()
        palette = exported.palette or distinct_colors(exported.num_classes)
        return Subject(exported, exported.num_classes, exported.classes, palette, digest)
    network = load_model(model)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    config = network.config
    hashed = hashlib.sha256(json.dumps(config.as_dict()).encode())
    for name, tensor in network.state_dict().items():
        hashed.update(name.encode())
        hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    palette = config.palette or distinct_colors(config.num_classes)
    served = fold_batch_norm(network).to(device)
    if compiled:
        compile_for_inference(served)
    return Subject(CapturedModel(served), config.num_classes, config.classes, palette, hashed.hexdigest())


def predict_pictures(
    task: Task,
    pictures: Sequence[Picture],
    *,
    share: tuple[int, int] = (0, 1),
    report: Callable[[str, int, int | None], None] = lambda *_: None,
) -> list[Outcome]:
    """Predict pictures into a folder. Where something is wrong with one, its outcome says so, and the rest goes on.

    Args:
        task: what to do.
        pictures: what to predict, and what to call the results.
        share: this process's number, and of how many that split the list between them.
        report: told how many are done, of how many.
    """
    predictor = task.predictor()
    rank, ranks = share
    mine = list(pictures[rank::ranks])
    number = len(mine)
    outcomes: list[Outcome] = []
    with Claims(task.out / ".predict.lock") as claims:
        with claims.claimed(RECORD, wait=True):
            _record(task)
        # Those that another process is at are looked at again when the rest is done.
        for wait in (False, True):
            busy: list[Picture] = []
            for picture in mine:
                with claims.claimed(str(picture.name), wait=wait) as ours:
                    if ours:
                        outcomes.append(_outcome(task, predictor, picture))
                        report("pictures", len(outcomes), number)
                    else:
                        busy.append(picture)
            mine = busy
    return outcomes


def summary(outcomes: Sequence[Outcome], left_out: int, out: Path) -> list[str]:
    """What became of all pictures together, for people."""
    done = [outcome for outcome in outcomes if outcome.message is None]
    already = sum(outcome.there_already for outcome in done)
    lines = [f"{len(done) - already} predicted, {already} there already, {len(outcomes) - len(done)} failed: {out}"]
    if left_out:
        lines.append(f"left out, because they do not end as images do: {left_out}")
    lines += [
        f"{outcome.image}: {100 * outcome.grid_disagreement:.2f}% of the pixels get another class by another grid"
        for outcome in done
        if outcome.grid_disagreement is not None
    ]
    return lines


def gathered(outcomes: list[Outcome]) -> list[Outcome]:
    """Those of all processes that torchrun started, in each of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return outcomes
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, outcomes)
    return [outcome for part in parts for outcome in part]


def _record(task: Task) -> None:
    """Write down what makes the results; refuse a folder where something else made them."""
    path, subject = task.out / RECORD, task.subject
    made_by = {
        "model": subject.digest,
        "classes": subject.classes,
        "palette": subject.palette,
        **asdict(task.manner),
    }
    wanted = json.loads(json.dumps(made_by))
    if path.exists():
        try:
            found = json.loads(path.read_text())["made_by"]
            other = [name for name in wanted if found[name] != wanted[name]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: not a record of predictions; expected what caaseg predict wrote; give another --out"
            ) from error
        if not other:
            return
        if any(result.is_file() and result != path and result.name[0] != "." for result in task.out.rglob("*")):
            raise ValueError(
                f"{path.parent}: holds predictions of another {' and another '.join(other)}; "
                "give another --out, or remove that folder"
            )
    remove_stale_temporaries(path)
    with atomic_write(path) as aside:
        aside.write_text(json.dumps({"caaseg": caaseg.__version__, "made_by": made_by}, indent=1) + "\n")


def _outcome(task: Task, predictor: Predictor, picture: Picture) -> Outcome:
    path = picture.path
    try:
        return _there_already(task, picture) or _predicted(task, predictor, picture)
    except BadFileError as error:
        message = str(error)
    except OSError as error:
        if error.errno in OF_ALL:
            raise
        message = f"{path}: its results cannot be written ({error}); rename the file"
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or is_out_of_memory(error):
            message = (
                f"{path}: needs more memory than there is; give a smaller --window, fewer --scales, or --precision bf16"
            )
        else:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"{path}: the model failed on it ({reason}); try another --window"
    return Outcome(image=str(path), message=message)


def _there_already(task: Task, picture: Picture) -> Outcome | None:
    """The outcome of a picture that is done: all that is asked for is there, and made from the file as it is."""
    places = _places(task.out, picture.name)
    note = _note(places)
    done = (
        _fingerprint(picture.path).items() <= note.items()
        and any(path.exists() for path in places.overlays)
        and (places.probabilities.exists() or not task.probabilities)
        and ("grid_disagreement" in note or not task.compare_grids)
    )
    if not done:
        return None
    disagreement = note["grid_disagreement"] if task.compare_grids else None
    return Outcome(
        image=str(picture.path), labels=str(places.labels), there_already=True, grid_disagreement=disagreement
    )


def _note(places: "Places") -> dict[str, Any]:
    """What was noted when a picture's labels were made; nothing where there are none."""
    try:
        note = json.loads(read_note(places.labels) or "{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _predicted(task: Task, predictor: Predictor, picture: Picture) -> Outcome:
    started = time.perf_counter()
    places, subject = _places(task.out, picture.name), task.subject
    note = _fingerprint(picture.path)
    image = read_image(picture.path, max_pixels=task.max_pixels)
    size = (image.shape[1], image.shape[2])
    window = task.window(size)
    before = _note(places)
    outdated = [places.labels, *places.overlays]
    if note.items() <= before.items():  # made from the file as it is: what is not asked for now is kept
        note |= before
    if task.probabilities or note != before:
        outdated.append(places.probabilities)
    for old in outdated:
        old.unlink(missing_ok=True)
    for place in (places.labels, *places.overlays, places.probabilities):
        remove_stale_temporaries(place)  # the picture is ours alone

    labels = np.empty(size, dtype=np.uint8)
    with ExitStack() as stack:
        kept = None
        if task.probabilities:
            kept = stack.enter_context(ProbabilityFile(places.probabilities, size, subject.num_classes))
        for rows, columns, scores in blended_parts(predictor, image, window):
            labels[rows, columns] = scores.argmax(0).to(torch.uint8).cpu().numpy()
            if kept is not None:
                kept.write(rows, columns, scores if task.manner.average == "probabilities" else scores.softmax(0))
    disagreement = None
    if task.compare_grids:
        if is_cut(size, window):
            disagreement = grid_disagreement(predictor, image, torch.from_numpy(labels), window)
        note["grid_disagreement"] = disagreement
    save_overlay(image, labels, subject.palette, places.overlays[exceeds_jpeg_limit(size)])
    save_labels(labels, subject.palette, places.labels, json.dumps(note))
    return Outcome(
        image=str(picture.path),
        labels=str(places.labels),
        size=size,
        windowed=is_cut(size, window),
        grid_disagreement=disagreement,
        seconds=time.perf_counter() - started,
    )


class Places(NamedTuple):
    """Where the results of a picture go."""

    labels: Path
    overlays: tuple[Path, Path]  # one of them: JPEG, or PNG where that is too small
    probabilities: Path


def _places(out: Path, name: Path) -> Places:
    labels, overlays, probabilities = (out / folder / name for folder in FOLDERS)
    return Places(
        _ending(labels, ".png"),
        (_ending(overlays, ".jpg"), _ending(overlays, ".png")),
        _ending(probabilities, ".npy"),
    )


def _ending(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)  # not with_suffix: dots in a name are no endings


def _fingerprint(path: Path) -> dict[str, Any]:
    """What tells a file from what it was before, and from another of its name."""
    try:
        status = path.stat()
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}; expected an image") from error
    return {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}
