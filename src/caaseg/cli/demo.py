"""`caaseg demo`: see it work, with no files and no network."""

from pathlib import Path

from caaseg.cli.terminal import console_for, training_bars, write_json
from caaseg.cli.words import Device, check_folder, check_writable


def demo(
    out: Path = Path("caaseg-demo"),
    *,
    steps: int | None = None,
    device: Device = "auto",
    json: str | None = None,
) -> int:
    """Train an FCN and a CAA model on drawn scenes, score both, and write a page that shows what came out.

    It takes some minutes on two cores, needs no files and no network, and goes on where it was interrupted.

    Args:
        out: folder for report.html and for both runs.
        steps: train for so many steps instead of the recipes' number.
        device: where to run; auto takes a GPU if there is one.
        json: file for the numbers; - is standard output.
    """
    from caaseg.api import REPORT
    from caaseg.demo import run_demo

    check_writable(json=json)
    check_folder(out, "--out")
    console = console_for(json)

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    with training_bars(console) as show:
        numbers = run_demo(out, steps=steps, device=device, progress=show, log=tell)
    if numbers is None:
        tell("stopped; the same command goes on from here")
        return 143  # as a shell says it of a command that SIGTERM ended
    for name, model in numbers["models"].items():
        tell(f"{name}: {100 * model['mean_iou']:.1f} % mean IoU on test, trained in {model['training_seconds']:.0f} s")
    for sentence in numbers["finding"]:
        tell(sentence)
    if json is not None:
        write_json(numbers, json, console)
    tell(f"report: {out / REPORT}")
    return 0
