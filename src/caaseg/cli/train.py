"""`caaseg train` and `caaseg recipes`."""

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from caaseg.cli.terminal import console_for, training_bars
from caaseg.cli.words import Device


def recipes() -> int:
    """List the shipped recipes, each a complete file; train one by its name, or copy and change it."""
    from caaseg.recipes import SHIPPED, SUFFIX, recipe_names

    for name in recipe_names():
        first = (SHIPPED / f"{name}{SUFFIX}").read_text().partition("\n")[0]
        print(f"{name:32} {first.lstrip('# ') if first.startswith('#') else ''}".rstrip())
    return 0


def train_by_recipe(
    recipe: str,
    *,
    out: Path | None = None,
    resume: str | None = None,
    init_from: str | None = None,
    device: Device = "auto",
    devices: int = 1,
    overrides: Sequence[str] = (),
) -> int:
    """Train a model by a recipe. Every value of the recipe can be overridden, such as --model.output_stride 8.

    Args:
        recipe: a name of caaseg recipes, or a YAML file.
        out: the run's folder; runs/ and the recipe's name unless given.
        resume: auto goes on from the newest good checkpoint, or starts where there is none; or a checkpoint's path.
        init_from: start from the weights of this model: a run's folder, a saved model's folder or a hub id. It may
            have another number of classes.
        device: where to run; auto takes a GPU if there is one.
        devices: how many GPUs, or processes on a CPU, of this machine. Under torchrun or SLURM these say it.
        overrides: values of the recipe, as words.
    """
    from caaseg.recipes import default_folder, load_recipe

    loaded = load_recipe(recipe, overrides)  # before the heavy imports: a mistake in it is said at once
    folder = out or default_folder(recipe)

    from caaseg.api import REPORT, train
    from caaseg.training.setup import is_first_rank

    console = console_for(None)
    with training_bars(console) as show:
        result = train(
            loaded,
            folder,
            resume=resume,
            init_from=init_from,
            device=device,
            devices=devices,
            progress=partial(show, "training"),
        )
    if not is_first_rank():
        console.quiet = True  # of several processes one speaks
    if not result.finished:
        console.print(f"stopped after step {result.step}; go on with --resume auto --out {folder}", highlight=False)
        return 128 + (result.stopped_by or signal.SIGTERM)  # as a shell says it of a command that a signal ended
    if result.best_mean_iou is not None:
        best = (
            f"best mean IoU on {loaded.data.val_split}: {100 * result.best_mean_iou:.2f}, after step {result.best_step}"
        )
        console.print(best, highlight=False)
    console.print(f"model: {folder / 'model'}", soft_wrap=True, highlight=False)
    console.print(f"report: {folder / REPORT}", soft_wrap=True, highlight=False)
    return 0
