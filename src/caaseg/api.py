"""A training run with its report: what `caaseg train` and `caaseg.train` do."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from caaseg.benchmarks.timing import provenance
from caaseg.config import Recipe
from caaseg.data.loader import worthwhile
from caaseg.evaluation.best_worst import BestWorstImages
from caaseg.evaluation.evaluate import evaluate
from caaseg.models import load_model
from caaseg.models.predictor import Predictor
from caaseg.recipes import default_folder, load_recipe
from caaseg.reports.run import write_run_page
from caaseg.training import runs
from caaseg.training.conductor import Progress, Result
from caaseg.training.metrics_log import FILE as JOURNAL
from caaseg.training.metrics_log import read_metrics
from caaseg.training.runs import Device
from caaseg.training.setup import open_datasets

REPORT = "report.html"


def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    device: Device = "auto",
    devices: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Train a model; when it is trained, score it on the validation split and write report.html into its folder.

    Args:
        recipe: a recipe, the name of a shipped one, or a YAML file.
        out: the run's folder; runs/ and the recipe's name unless given.
        resume: "auto" goes on from the newest good checkpoint in the folder, or starts where there is none; a path
            goes on from that checkpoint.
        init_from: start from the weights of this model (a run, a saved folder or a hub id) instead of random ones; it
            may have another number of classes.
        device: cpu or cuda; auto takes GPUs if there are any.
        devices: how many on this machine. Under torchrun or SLURM these say it.
        progress: told every few steps, on the first rank.
    """
    folder = default_folder(recipe) if out is None else Path(out)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    joined_before = dist.is_available() and dist.is_initialized()
    result = runs.train(
        recipe, folder, resume=resume, init_from=init_from, device=device, devices=devices, progress=progress
    )
    if dist.is_available() and dist.is_initialized() and not joined_before:
        dist.destroy_process_group()  # lightning leaves it; what follows is the first rank's alone
    if result.finished and runs.is_first_rank() and _is_due(folder):
        on_gpu = device not in ("cpu", "mps") and torch.cuda.is_available()
        place = device if ":" in device else "cuda" if on_gpu else "cpu"
        write_report(recipe, folder, torch.device(place))
    return result


def write_report(recipe: Recipe, folder: Path, device: torch.device) -> None:
    """Score a finished run's model on the validation split, image by image, and write its report."""
    _, data = open_datasets(recipe)
    model = load_model(folder / "model").to(device)
    extremes = BestWorstImages(len(data.classes))
    evaluation = evaluate(
        Predictor(model, precision="32" if recipe.precision == "32" else "bf16"),
        data,
        workers=worthwhile(recipe.data.workers, len(data)),
        seen=extremes.see,
    )
    write_run_page(
        folder / REPORT,
        recipe=recipe,
        journal=read_metrics(folder / JOURNAL),
        evaluation=evaluation,
        extremes=extremes,
        palette=data.palette,
        origin=origin_of(device),
    )


def origin_of(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, those of the training's libraries too."""
    origin = provenance(device, [])
    return {**origin, "versions": origin["versions"] | {name: version(name) for name in ("lightning", "timm")}}


def _is_due(folder: Path) -> bool:
    """Whether a finished run has no report yet, or one of an earlier model."""
    report = folder / REPORT
    return not report.exists() or report.stat().st_mtime < (folder / "model" / "model.safetensors").stat().st_mtime
