"""The demo: the shipped model on a photo, then an FCN and a CAA model trained and compared on synthetic scenes."""

import json
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caaseg.analysis.pixel_attention import predict_with_attention
from caaseg.api import REPORT, origin_of, train
from caaseg.config import Recipe
from caaseg.data.decode import read_image
from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.evaluation.evaluate import evaluate
from caaseg.files import atomic_write
from caaseg.models import load_model
from caaseg.recipes import load_recipe
from caaseg.reports.demo import DemoModel, DemoPhoto, findings, write_demo_page
from caaseg.reports.evaluation import scores_as_json
from caaseg.training.checkpoints import RECIPE
from caaseg.training.loop import TrainingResult
from caaseg.training.metrics_log import FILE as METRICS
from caaseg.training.metrics_log import read_metrics
from caaseg.training.setup import open_split
from caaseg.training.step_log import Progress

RECIPES = {"FCN": "scenes/demo_fcn", "CAA": "scenes/demo_caa"}
NUMBERS = "numbers.json"
NUM_SHOWN = 4  # scenes on the page
SHIPPED = "camvid"
SAMPLE = Path(__file__).parent / "shipped" / "sample" / "summer-palace.jpg"
PIXEL = (179, 339)  # row and column in the sample photo: sky beside the building
BATCH_SIZE = 8  # of the evaluation


def run_demo(
    out: Path,
    *,
    recipes: Mapping[str, str] = RECIPES,
    steps: int | None = None,
    device: str = "auto",
    progress: Callable[[str, Progress], None] | None = None,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, Any] | None:
    """Write report.html with the shipped model, then train two models, evaluate them, and write it again with both.

    Resumes an interrupted call.

    Args:
        out: directory for the report and both runs.
        recipes: recipes of the models FCN and CAA, each a name or a file.
        steps: number of training steps; None uses the recipes' number.
        device: cpu or cuda; auto uses a GPU if available.
        progress: called every few steps with the name of the model and its progress.
        log: called with messages.

    Returns:
        The scores and findings; None if training was stopped and can be resumed.
    """
    overrides = [] if steps is None else ["--steps", str(steps)]
    loaded = {name: load_recipe(recipe, overrides) for name, recipe in recipes.items()}
    if (numbers := _finished_numbers(out, loaded)) is not None:
        log("already finished")
        return numbers
    torch_device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    photo, origin = predict_sample(torch_device), origin_of(torch_device)
    write_demo_page(out / REPORT, photo, origin=origin)
    log(f"shipped model {SHIPPED} on a sample photo, with its attention: {out / REPORT}")
    unfinished = {name: recipe for name, recipe in loaded.items() if not _is_trained(out / name.lower(), recipe)}
    for name, recipe in unfinished.items():
        log(f"{name}: training for {recipe.steps} steps in {out / name.lower()}")
    if not train_in_parallel(unfinished, out, device, progress):
        return None
    data = open_split(loaded["CAA"], "test")
    models = {name: evaluate_run(out / name.lower(), recipe, data, torch_device) for name, recipe in loaded.items()}
    numbers = {
        **{key: origin[key] for key in ("commit", "hardware", "versions")},
        "finding": findings(models["FCN"].scores, models["CAA"].scores),
        "models": {
            name: {"training_seconds": model.training_s, **scores_as_json(model.evaluation)}
            for name, model in models.items()
        },
    }
    samples = [data[k] for k in range(min(NUM_SHOWN, len(data)))]
    reports = {name: f"{name.lower()}/{REPORT}" for name in loaded}
    write_demo_page(out / REPORT, photo, models, samples, reports=reports, origin=origin)
    with atomic_write(out / NUMBERS) as temporary:  # written last: its existence means that the demo is finished
        temporary.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return numbers


def predict_sample(device: torch.device) -> DemoPhoto:
    """Predict the sample photo with the shipped model, and explain a pixel of it."""
    model, image = load_model(SHIPPED).to(device), read_image(SAMPLE)
    predicted = predict_with_attention(model, image)
    attention = predicted.at(PIXEL)
    assert attention is not None
    classes, palette = model.config.classes, model.config.palette
    assert classes is not None
    assert palette is not None
    return DemoPhoto(image, predicted.labels, classes, palette, attention, PIXEL)


def train_in_parallel(
    recipes: Mapping[str, Recipe], out: Path, device: str, progress: Callable[[str, Progress], None] | None
) -> bool:
    """Train each recipe in its own process and return whether all runs finished.

    The processes share the cores, because networks this small gain little from a second thread.
    """
    spawn = get_context("spawn")
    names: dict[Connection, str] = {}  # by the receiving end of the pipe
    threads = max(1, torch.get_num_threads() // max(1, len(recipes)))
    for name, recipe in recipes.items():
        receiver, sender = spawn.Pipe(duplex=False)
        # Daemons end with this process, after a checkpoint.
        arguments = (recipe, out / name.lower(), device, threads, sender)
        spawn.Process(target=train_in_process, args=arguments, daemon=True).start()
        sender.close()
        names[receiver] = name
    results: dict[str, TrainingResult] = {}
    while names:
        for ready in wait(list(names)):
            assert isinstance(ready, Connection)
            try:
                message: Progress | TrainingResult | Exception = ready.recv()
            except EOFError:
                name = names.pop(ready)
                if name not in results:
                    raise RuntimeError(f"{name}: the training process ended without a result") from None
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, TrainingResult):
                results[names[ready]] = message
            elif progress is not None:
                progress(names[ready], message)
    return all(result.finished for result in results.values())


def train_in_process(recipe: Recipe, directory: Path, device: str, threads: int, sender: Connection) -> None:
    """Train a recipe and send progress, then the result or an error, through a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    torch.set_num_threads(threads)

    def progress(current: Progress) -> None:
        try:
            sender.send(current)
        except BrokenPipeError:  # the parent is gone: stop with a checkpoint, to resume later
            signal.raise_signal(signal.SIGTERM)

    outcome: TrainingResult | Exception
    try:
        result = train(recipe, directory, resume="auto", device=device, progress=progress)
        outcome = result._replace(evaluation=None, best_worst=None)  # a process that ends cannot send tensors
    except (ValueError, OSError) as error:
        outcome = error
    with suppress(BrokenPipeError):
        sender.send(outcome)


def evaluate_run(directory: Path, recipe: Recipe, data: SegmentationDataset, device: torch.device) -> DemoModel:
    """Evaluate the model of a run, and keep its predictions for the first scenes."""
    shown: list[Tensor] = []

    def collect(batch: Batch, predictions: Tensor) -> None:
        shown.extend(predictions[: max(0, NUM_SHOWN - len(shown))].to("cpu", torch.uint8))

    model = load_model(directory / "model").to(device)
    evaluation = evaluate(model, data, batch_size=BATCH_SIZE, on_batch=collect)
    return DemoModel(recipe, read_metrics(directory / METRICS), evaluation, shown)


def _is_trained(directory: Path, recipe: Recipe) -> bool:
    """Return whether a run has finished with this recipe: its report is written last."""
    return (directory / REPORT).exists() and load_recipe(directory / RECIPE) == recipe


def _finished_numbers(out: Path, recipes: Mapping[str, Recipe]) -> dict[str, Any] | None:
    """Return the numbers of an earlier, finished call with the same recipes, or None."""
    saved = {out / name.lower() / RECIPE: recipe for name, recipe in recipes.items()}
    if not all(path.exists() for path in (out / REPORT, out / NUMBERS, *saved)):
        return None
    if any(load_recipe(path) != recipe for path, recipe in saved.items()):
        return None
    numbers: dict[str, Any] = json.loads((out / NUMBERS).read_text(encoding="utf-8"))
    return numbers
