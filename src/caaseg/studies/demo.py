"""The demonstration: an FCN and a CAA model that differ in the head alone, on scenes that are drawn."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caaseg.config import Recipe
from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.evaluation.evaluate import evaluate
from caaseg.files import written_whole
from caaseg.models import load_model
from caaseg.recipe_files import load_recipe
from caaseg.reports.demo import Contender, finding, write_demo_page
from caaseg.reports.scores import scores_as_json
from caaseg.studies.training import REPORT, origin_of, train
from caaseg.training import runs
from caaseg.training.journal import FILE as JOURNAL
from caaseg.training.journal import read_lines
from caaseg.training.runs import Device, Progress

RECIPES = {"FCN": "scenes/demo_fcn", "CAA": "scenes/demo_caa"}
NUMBERS = "numbers.json"
SHOWN = 4  # scenes
BATCH = 8  # scenes scored at once


def run_demo(
    out: Path,
    *,
    steps: int | None = None,
    device: Device = "auto",
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
    for name, recipe in recipes.items():
        folder = out / name.lower()
        tell(f"{name}: training for {recipe.steps} steps in {folder}")
        result = train(
            recipe,
            folder,
            resume="auto",
            device=device,
            progress=None if progress is None else partial(progress, name),
        )
        if not result.finished:
            return None
    if (numbers := _numbers_of(out)) is not None:
        tell("all of it was done before")
        return numbers
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    _, data = runs.open_data(_on_test(recipes["CAA"]))
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
    with written_whole(out / NUMBERS) as aside:  # last: it says that all is done
        aside.write_text(json.dumps(numbers, indent=1) + "\n")
    return numbers


def score(folder: Path, recipe: Recipe, data: SegmentationDataset, device: torch.device) -> Contender:
    """A trained model on the test split, with what it makes of the scenes shown."""
    shown: list[Tensor] = []

    def seen(batch: Batch, predictions: Tensor) -> None:
        shown.extend(predictions[: max(0, SHOWN - len(shown))].to("cpu", torch.uint8))

    model = load_model(folder / "model").to(device)
    evaluation = evaluate(model, data, batch_size=BATCH, seen=seen)
    return Contender(recipe, read_lines(folder / JOURNAL), evaluation, shown)


def _on_test(recipe: Recipe) -> Recipe:
    return replace(recipe, data=replace(recipe.data, val_split="test"))


def _numbers_of(out: Path) -> dict[str, Any] | None:
    """What an earlier call found, if all of its files are there and none is older than what it was made from."""
    made = [out / REPORT, out / NUMBERS]
    models = [out / name.lower() / "model" / "model.safetensors" for name in RECIPES]
    if not all(path.exists() for path in made):
        return None
    if min(path.stat().st_mtime for path in made) < max(path.stat().st_mtime for path in models):
        return None
    numbers: dict[str, Any] = json.loads((out / NUMBERS).read_text())
    return numbers
