"""The library's `train`: a run and its report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from caaseg.benchmarks.provenance import provenance
from caaseg.config import Recipe
from caaseg.data.catalogue import with_palette
from caaseg.data.loader import useful_workers
from caaseg.data.sample import SegmentationDataset
from caaseg.evaluation.best_worst import BestWorstImages
from caaseg.evaluation.evaluate import Evaluation, evaluate
from caaseg.evaluation.metrics import MetricFactory
from caaseg.models import Segmenter, load_model
from caaseg.models.heads import own_head
from caaseg.models.predictor import Predictor
from caaseg.recipes import load_recipe
from caaseg.reports.run import write_run_page
from caaseg.training import run as training_run
from caaseg.training.loop import TrainingResult
from caaseg.training.losses import Loss
from caaseg.training.metrics_log import FILE as METRICS
from caaseg.training.metrics_log import read_metrics
from caaseg.training.setup import is_first_rank, open_split
from caaseg.training.step_log import Progress

REPORT = "report.html"

Data = str | Path | tuple[SegmentationDataset, SegmentationDataset]


def default_run_directory(recipe: Recipe | str | Path) -> Path:
    """Return the default run directory of a recipe: runs/ and the recipe's name."""
    if isinstance(recipe, Recipe):
        name = f"{recipe.data.dataset}-{recipe.model.head}_{recipe.model.backbone}"
    else:
        name = Path(recipe).with_suffix("").as_posix()
    return Path("runs") / name.replace("/", "-").strip(".-")


def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    *,
    data: Data | None = None,
    model: Segmenter | None = None,
    loss: Loss | None = None,
    metrics: Sequence[MetricFactory] = (),
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    device: str = "auto",
    devices: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train a model and write report.html, with the scores of the final model, into the run directory.

    Args:
        recipe: a recipe, the name of a shipped one, or a YAML file.
        out: the run directory; runs/ and the name of the recipe if not given.
        data: the directory of the recipe's dataset, or a training and a validation dataset of your own.
        model: a model of your own, instead of the recipe's; it needs as many classes as the data.
        loss: a loss of your own, instead of the recipe's cross entropy.
        metrics: further validation metrics, each called with the number of classes and the device.
        resume: "auto" resumes from the newest good checkpoint of the run directory, or starts if there is none; a path
            resumes from that checkpoint.
        init_from: a model (a run, a saved directory, a shipped name or hf://owner/name) to take architecture and
            initial weights from; it may have other classes.
        device: auto, cpu, cuda, cuda:INDEX or mps; auto is a GPU if there is one.
        devices: number of processes on this machine, one per GPU. Under torchrun or SLURM these set it.
        progress: called every few steps, on the first rank.

    Returns:
        The run directory, the last step, the best validation score, and the scores of the final model.
    """
    directory = default_run_directory(recipe) if out is None else Path(out)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if isinstance(data, str | Path):
        recipe, data = recipe.replace(data=recipe.data.replace(root=str(data))), None
    elif data is not None:
        data = with_palette(data[0]), with_palette(data[1])
    result = training_run.train(
        recipe,
        directory,
        data=data,
        model=model,
        loss=loss,
        metrics=metrics,
        resume=resume,
        init_from=init_from,
        device=device,
        devices=devices,
        progress=progress,
    )
    if result.finished and is_first_rank() and (result.evaluation is not None or not _has_report(directory)):
        write_report(result.recipe, result, None if data is None else data[1], device)
    return result


def write_report(
    recipe: Recipe, result: TrainingResult, val_data: SegmentationDataset | None, device: str = "auto"
) -> None:
    """Write the report of a finished run. The model is scored again only if the run was finished before."""
    torch_device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    data = open_split(recipe, recipe.data.val_split) if val_data is None else val_data
    evaluation, best_worst = result.evaluation, result.best_worst
    if evaluation is None or best_worst is None:
        evaluation, best_worst = _score(recipe, result.run, data, torch_device)
    write_run_page(
        result.run / REPORT,
        recipe=recipe,
        metrics=read_metrics(result.run / METRICS),
        evaluation=evaluation,
        best_worst=best_worst,
        palette=data.palette,
        origin=origin_of(torch_device),
    )


def _score(
    recipe: Recipe, run: Path, data: SegmentationDataset, device: torch.device
) -> tuple[Evaluation, BestWorstImages]:
    best_worst = BestWorstImages(len(data.classes))
    model = load_model(run / "model", head=own_head(recipe.model.head)).to(device)
    predictor = Predictor(model, precision="32" if recipe.precision == "32" else "bf16")
    workers = useful_workers(recipe.data.workers, len(data))
    return evaluate(predictor, data, workers=workers, on_batch=best_worst.update), best_worst


def origin_of(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, including those of the training libraries."""
    import timm
    from lightning_fabric.__version__ import version as fabric_version

    origin = provenance(device, [])
    versions = {"lightning_fabric": fabric_version, "timm": timm.__version__}
    return {**origin, "versions": origin["versions"] | versions}


def _has_report(run: Path) -> bool:
    """Return whether the report is newer than the model."""
    report = run / REPORT
    return report.exists() and report.stat().st_mtime >= (run / "model" / "model.safetensors").stat().st_mtime
