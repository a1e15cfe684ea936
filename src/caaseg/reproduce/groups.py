"""The paper's figure of grouped vectorization: time and memory against the number of groups."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from caaseg.benchmarks import attention as benchmark
from caaseg.benchmarks.attention import Measurement
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
    "The paper plots the inference time of three image sizes on a V100 and prints no numbers; it states that 4 groups "
    "are about as fast as full vectorization. Our numbers are for the attention alone, with one image in float32."
)


def measure_groups(
    device: torch.device,
    *,
    sizes: Sequence[Size] | None = None,
    channels: int = 512,
    seconds: float = 0.2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Measurement]:
    """Measure grouped vectorization, the row-by-row loop, the factorised form, and plain axial attention.

    Args:
        device: device to run on.
        sizes: batch, height and width of the feature maps; by default three sizes on a GPU and two on a CPU.
        channels: value channels.
        seconds: approximate duration of each measurement.
        progress: called with the number of measurements done and the total.
    """
    implementations: tuple[benchmark.Implementation, ...] = ("axial", "factorised", "grouped", "loop")
    sizes = SIZES["cuda" if device.type == "cuda" else "cpu"] if sizes is None else sizes
    cases = benchmark.cases(sizes, ["float32"], implementations, GROUPS, channels=channels, key_channels=64)
    measurements = []
    for measurement in benchmark.run(cases, device, seconds=seconds):
        measurements.append(measurement)
        if progress is not None:
            progress(len(measurements), len(cases))
    return measurements


def groups_as_json(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the measurements as plain values."""
    records, ratios = [benchmark.as_json(found) for found in measurements], benchmark.ratios(measurements)
    return {"table": "groups", "notes": [NOTE], "measurements": records, "ratios": ratios}


def groups_markdown(measurements: Sequence[Measurement]) -> str:
    """Return the measurements as Markdown; times are relative to the factorised form."""
    lines = ["# Time and memory against the number of groups", ""]
    headings = ("size", "implementation", "forward, relative to factorised", "training, relative to factorised")
    lines += [f"| {' | '.join(headings)} | training memory, MB |"]
    lines += ["|:---|:---|---:|---:|---:|"]
    ours = {found.case.workload: found for found in measurements if found.case.implementation == "factorised"}
    for found in measurements:
        batch, height, width, _ = found.case.workload
        reference = ours[found.case.workload]
        peak = found.training_peak_bytes
        cells = (
            f"{batch} x {height} x {width}",
            found.case.label,
            _ratio(found.forward_ms, reference.forward_ms),
            _ratio(found.training_ms, reference.training_ms),
            "out of memory" if peak is None else f"{peak / 1e6:,.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    notes = [NOTE, *ratio_lines(benchmark.ratios(measurements))]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _ratio(time: float | None, reference: float | None) -> str:
    return "" if time is None or not reference else f"{time / reference:.2f}"


def write_groups(measurements: Sequence[Measurement], directory: Path, origin: Mapping[str, Any]) -> None:
    """Write groups.md, groups.json and groups.png."""
    with atomic_write(directory / "groups.md") as temporary:
        temporary.write_text(groups_markdown(measurements), encoding="utf-8")
    with atomic_write(directory / "groups.json") as temporary:
        temporary.write_text(json.dumps({**origin, **groups_as_json(measurements)}, indent=1) + "\n", encoding="utf-8")
    save(draw_groups(measurements), directory / "groups.png")
