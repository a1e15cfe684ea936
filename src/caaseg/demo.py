"""The demonstration: an FCN and a CAA model that differ in the head alone, on scenes that are drawn."""

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

from caaseg.api import REPORT, origin_of, train
from caaseg.config import Recipe
from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.evaluation.evaluate import evaluate
from caaseg.files import atomic_write
from caaseg.models import load_model
from caaseg.recipes import load_recipe
from caaseg.reports.demo import Contender, finding, write_demo_page
from caaseg.reports.scores import scores_as_json
from caaseg.training import checkpoints as runs
from caaseg.training.loop import Progress
from caaseg.training.loop import TrainingResult as Result
from caaseg.training.metrics_log import FILE as JOURNAL
from caaseg.training.metrics_log import read_metrics
from caaseg.training.setup import open_datasets

RECIPES = {"FCN": "scenes/demo_fcn", "CAA": "scenes/demo_caa"}
NUMBERS = "numbers.json"
SHOWN = 4  # scenes
BATCH = 8  # scenes scored at once


def run_demo(
    out: Path,
    *,
    steps: int | None = None,
    device: str = "auto",
    progress: Callable[[str, Progress], None] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any] | None:
    """Train both, score both on the test split and write report.html; go on where an earlier call stopped.

    Args:
        out: folder for the report and both runs.
        steps: train for so many instead of the recipes' number.
        device: cpu or cuda; auto takes a GPU if there is one.
        progress: told every few steps, with the model's name.
        tell: told in a line what begins and what came out.

    Returns:
        The numbers; None if the training was asked to stop and can go on.
    """
    words = [] if steps is None else ["--steps", str(steps)]
    recipes = {name: load_recipe(recipe, words) for name, recipe in RECIPES.items()}
    if (numbers := _numbers_of(out, recipes)) is not None:
        tell("all of it was done before")
        return numbers
    for name, recipe in recipes.items():
        tell(f"{name}: training for {recipe.steps} steps in {out / name.lower()}")
    if not train_side_by_side(recipes, out, device, progress):
        return None
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    _, data = open_datasets(_on_test(recipes["CAA"]))
    contenders = {name: score(out / name.lower(), recipe, data, place) for name, recipe in recipes.items()}
    origin = origin_of(place)
    numbers = {
        **{key: origin[key] for key in ("commit", "hardware", "versions")},
        "finding": finding(contenders["FCN"].outcome, contenders["CAA"].outcome),
        "models": {
            name: {"training_seconds": one.training_s, **scores_as_json(one.evaluation)}
            for name, one in contenders.items()
        },
    }
    samples = [data[k] for k in range(min(SHOWN, len(data)))]
    reports = {name: f"{name.lower()}/{REPORT}" for name in recipes}
    write_demo_page(out / REPORT, contenders, samples, reports=reports, origin=origin)
    with atomic_write(out / NUMBERS) as aside:  # last: it says that all is done
        aside.write_text(json.dumps(numbers, indent=1) + "\n")
    return numbers


def train_side_by_side(
    recipes: Mapping[str, Recipe], out: Path, device: str, progress: Callable[[str, Progress], None] | None
) -> bool:
    """Train all at once, a process each with its share of the cores, and say whether all are done.

    Networks this small gain next to nothing from a second thread, and lose much where another program wants the core.
    """
    spawn = get_context("spawn")
    names: dict[Connection, str] = {}  # by the end of the pipe that a process talks into
    for name, recipe in recipes.items():
        heard, told = spawn.Pipe(duplex=False)
        threads = max(1, torch.get_num_threads() // len(recipes))
        # A daemon: when this process ends, so do they, each with a checkpoint.
        spawn.Process(
            target=_train_alone, args=(recipe, out / name.lower(), device, threads, told), daemon=True
        ).start()
        told.close()
        names[heard] = name
    results: dict[str, Result] = {}
    while names:
        for ready in wait(list(names)):
            assert isinstance(ready, Connection)
            try:
                message: Progress | Result | Exception = ready.recv()
            except EOFError:
                name = names.pop(ready)
                if name not in results:
                    raise RuntimeError(f"{name}: its training ended without a result") from None
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Result):
                results[names[ready]] = message
            elif progress is not None:
                progress(names[ready], message)
    return all(result.finished for result in results.values())


def _train_alone(recipe: Recipe, folder: Path, device: str, threads: int, told: Connection) -> None:
    """In a process of its own: train, and tell how far it is and what came out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(threads)

    def progress(at: Progress) -> None:
        try:
            told.send(at)
        except BrokenPipeError:  # nobody listens any more: stop as a cluster would ask for it, to go on another time
            signal.raise_signal(signal.SIGTERM)

    outcome: Result | Exception
    try:
        # Without the images of the evaluation: tensors cannot be sent by a process that ends.
        result = train(recipe, folder, resume="auto", device=device, progress=progress)
        outcome = result._replace(evaluation=None, best_worst=None)
    except (ValueError, OSError) as error:
        outcome = error
    with suppress(BrokenPipeError):
        told.send(outcome)


def score(folder: Path, recipe: Recipe, data: SegmentationDataset, device: torch.device) -> Contender:
    """A trained model on the test split, with what it makes of the scenes shown."""
    shown: list[Tensor] = []

    def seen(batch: Batch, predictions: Tensor) -> None:
        shown.extend(predictions[: max(0, SHOWN - len(shown))].to("cpu", torch.uint8))

    model = load_model(folder / "model").to(device)
    evaluation = evaluate(model, data, batch_size=BATCH, on_batch=seen)
    return Contender(recipe, read_metrics(folder / JOURNAL), evaluation, shown)


def _on_test(recipe: Recipe) -> Recipe:
    return recipe.replace(data=recipe.data.replace(val_split="test"))


def _numbers_of(out: Path, recipes: Mapping[str, Recipe]) -> dict[str, Any] | None:
    """What an earlier call with the same recipes found, if it came to its end and its report is still there."""
    begun = [(out / name.lower() / runs.RECIPE, recipe) for name, recipe in recipes.items()]
    if not all(path.exists() for path in (out / REPORT, out / NUMBERS, *(path for path, _ in begun))):
        return None
    if any(load_recipe(path) != recipe for path, recipe in begun):
        return None
    numbers: dict[str, Any] = json.loads((out / NUMBERS).read_text())
    return numbers
