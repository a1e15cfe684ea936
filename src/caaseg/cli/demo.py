"""`caaseg demo`: predict a photo, then train and compare two small models, without files or a network."""

from pathlib import Path

from caaseg.cli.arguments import Device, check_directory, check_writable
from caaseg.cli.terminal import console_for, training_progress, write_json
from caaseg.config import Count


def demo(
    *,
    out: Path = Path("caaseg-demo"),
    steps: Count | None = None,
    device: Device = "auto",
    json: str | None = None,
) -> int:
    """Predict a sample photo, train an FCN and a CAA model on synthetic scenes, evaluate both, and write a report.

    The report shows the photo after a few seconds. Training takes some minutes on two cores, needs no files and no
    network, and resumes where it was interrupted.

    Args:
        out: directory for report.html and both runs.
        steps: number of training steps; by default that of the recipes.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        json: file for the results; - is standard output.
    """
    from caaseg.api import REPORT
    from caaseg.demo import run_demo

    check_writable(json=json)
    check_directory(out, "--out")
    console = console_for(json)

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    with training_progress(console) as show:
        numbers = run_demo(out, steps=steps, device=device, progress=show, log=tell)
    if numbers is None:
        tell("stopped; run the same command to continue")
        return 143  # as shells report a command that SIGTERM ended
    for name, model in numbers["models"].items():
        tell(f"{name}: {100 * model['mean_iou']:.1f} % mean IoU on test, trained in {model['training_seconds']:.0f} s")
    for sentence in numbers["finding"]:
        tell(sentence)
    if json is not None:
        write_json(numbers, json, console)
    tell(f"report: {out / REPORT}")
    return 0
