"""The paper's figure of grouped vectorization: time against the number of groups, and memory, with ours beside it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from caaseg.benchmarks import attention as benchmark
from caaseg.benchmarks.attention import Outcome
from caaseg.files import atomic_write
from caaseg.reports.figures import draw_groups, save
from caaseg.reports.tables import ratio_lines

Size = tuple[int, int, int]

GROUPS = (1, 2, 4, 8, 16, 32)
SIZES: dict[str, tuple[Size, ...]] = {
    "cuda": ((1, 33, 33), (1, 65, 65), (1, 97, 97)),  # 513, 1025 and 1537 pixels at stride 16
    "cpu": ((1, 17, 17), (1, 33, 33)),
}
NOTE = (
    "The paper draws the inference time of three sizes of image on a V100 and prints no number; it says that 4 groups "
    "are about as fast as none. Here it is the attention alone, of one image in float32."
)


def measure_groups(
    device: torch.device,
    *,
    sizes: Sequence[Size] | None = None,
    channels: int = 512,
    seconds: float = 0.2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Measure grouped vectorization with few and many groups, row by row, factorised, and plain axial attention.

    Args:
        device: where.
        sizes: batch, height and width of the feature maps; three on a GPU, two on a CPU, unless given.
        channels: of the values.
        seconds: about how long to repeat each measurement.
        progress: told how many are done, of how many.
    """
    chosen = SIZES[device.type] if sizes is None else sizes
    contenders: tuple[benchmark.Contender, ...] = ("axial", "factorised", "grouped", "loop")
    combinations = benchmark.cases(chosen, ["float32"], contenders, GROUPS, channels=channels, key_channels=64)
    outcomes = []
    for outcome in benchmark.run(combinations, device, seconds=seconds):
        outcomes.append(outcome)
        if progress is not None:
            progress(len(outcomes), len(combinations))
    return outcomes


def groups_as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Plain values."""
    measurements = [benchmark.as_json(outcome) for outcome in outcomes]
    return {"table": "groups", "notes": [NOTE], "measurements": measurements, "ratios": benchmark.ratios(outcomes)}


def groups_markdown(outcomes: Sequence[Outcome]) -> str:
    """The measurements as a page; times are over the factorised form's, taken in the same run."""
    lines = ["# Time and memory against the number of groups", ""]
    lines += ["| size | implementation | forward, to factorised | training, to factorised | training memory, MB |"]
    lines += ["|:---|:---|---:|---:|---:|"]
    ours = {outcome.case.place: outcome for outcome in outcomes if outcome.case.implementation == "factorised"}
    for outcome in outcomes:
        batch, height, width, _ = outcome.case.place
        reference = ours[outcome.case.place]
        peak = outcome.training_peak_bytes
        words = (
            f"{batch} x {height} x {width}",
            outcome.case.label,
            _ratio(outcome.forward_ms, reference.forward_ms),
            _ratio(outcome.training_ms, reference.training_ms),
            "out of memory" if peak is None else f"{peak / 1e6:,.1f}",
        )
        lines.append("| " + " | ".join(words) + " |")
    said = [NOTE, *ratio_lines(benchmark.ratios(outcomes))]
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in said)]) + "\n"


def _ratio(time: float | None, reference: float | None) -> str:
    return "" if time is None or not reference else f"{time / reference:.2f}"


def write_groups(outcomes: Sequence[Outcome], folder: Path, origin: Mapping[str, Any]) -> None:
    """Write groups.md, groups.json and groups.png, each whole."""
    with atomic_write(folder / "groups.md") as aside:
        aside.write_text(groups_markdown(outcomes))
    with atomic_write(folder / "groups.json") as aside:
        aside.write_text(json.dumps({**origin, **groups_as_json(outcomes)}, indent=1) + "\n")
    save(draw_groups(outcomes), folder / "groups.png")
