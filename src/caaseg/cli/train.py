"""`caaseg train`: train a model from a recipe."""

import signal
from functools import partial
from pathlib import Path

from caaseg.cli.arguments import Device, Overrides
from caaseg.cli.terminal import console_for, training_progress
from caaseg.config import Count


def train(
    recipe: str,
    *,
    out: Path | None = None,
    resume: str | None = None,
    device: Device = "auto",
    devices: Count = 1,
    overrides: Overrides = (),
) -> int:
    """Train a model from a recipe. Every value of the recipe is an option, such as --model.output-stride 8.

    Args:
        recipe: recipe or table row (see caaseg recipes), or a YAML file.
        out: run directory; by default runs/ and the recipe's name.
        resume: auto resumes from the newest valid checkpoint, or starts if there is none; or the path of a checkpoint.
        device: auto, cpu, cuda, cuda:N or mps; auto uses GPUs if there are any.
        devices: number of GPUs, or of processes on a CPU, of this machine; ignored under torchrun and SLURM.
        overrides: options of the recipe.
    """
    from caaseg.recipes import load_recipe

    loaded = load_recipe(recipe, overrides)  # before the slow imports, so that errors are immediate

    from caaseg import api
    from caaseg.training.setup import is_first_rank

    directory = out or api.default_run_directory(recipe)
    console = console_for(None)
    with training_progress(console) as show:
        result = api.train(
            loaded,
            directory,
            resume=resume,
            device=device,
            devices=devices,
            progress=partial(show, "training"),
        )
    if not is_first_rank():
        console.quiet = True
    if not result.finished:
        console.print(
            f"stopped after step {result.step}; continue with --resume auto --out {directory}", highlight=False
        )
        return 128 + (result.stopped_by or signal.SIGTERM)  # as shells report a command that a signal ended
    if result.stopped_early:
        patience = f"no better mean IoU in {result.recipe.early_stopping} validations"
        console.print(f"stopped early after step {result.step} of {result.recipe.steps}: {patience}")
    if result.best_mean_iou is not None:
        best = (
            f"best mean IoU on {loaded.data.val_split}: {100 * result.best_mean_iou:.2f}, after step {result.best_step}"
        )
        console.print(best, highlight=False)
    console.print(f"model: {directory / 'model'}", soft_wrap=True, highlight=False)
    console.print(f"report: {directory / api.REPORT}", soft_wrap=True, highlight=False)
    return 0
