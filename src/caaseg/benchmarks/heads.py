"""Cost of our heads compared with those of mmsegmentation, measured in one run with the same settings."""

import time
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any, Literal, NamedTuple

import torch

from caaseg.benchmarks.mmseg import check_installed
from caaseg.benchmarks.mmseg_settings import CONFIGURATIONS, mmseg_settings
from caaseg.benchmarks.model import ModelCost, Setting, measure_model
from caaseg.errors import CaasegError
from caaseg.models.heads import HEADS

Mode = Literal["eager", "regional", "compiled"]
COMPARED = tuple(head for head in HEADS if head in CONFIGURATIONS)
"""Heads that mmsegmentation has too."""
RATIOS = ("training_images_per_second", "inference_images_per_second", "training_peak_bytes", "inference_peak_bytes")
"""Fields of `ModelCost` that are compared."""


class Part(NamedTuple):
    """One measurement: a head, ours or mmsegmentation's, in one mode."""

    head: str
    mode: Mode
    ours: bool

    @property
    def model(self) -> str:
        """Name of the model, as `measure_model` takes it."""
        name = self.head if self.ours else f"mmseg:{self.head}"
        return name if self.mode == "eager" else f"{name}:{self.mode}"


class HeadCosts(NamedTuple):
    """All measurements."""

    measured: dict[Part, ModelCost]
    failed: dict[Part, str]  # error messages
    left: list[Part]  # not started


def measure_heads(
    heads: Sequence[str],
    modes: Sequence[Mode],
    setting: Setting,
    device: torch.device,
    *,
    seconds: float,
    limit_s: float | None = None,
) -> Iterator[tuple[Part, HeadCosts]]:
    """Measure our heads and those of mmsegmentation. A failed part is named in the result, and the others continue.

    Args:
        heads: names of heads, such as psp.
        modes: eager; regional or compiled, as `measure_model` describes them.
        setting: settings of both sides; output stride and auxiliary classifier are those of mmsegmentation's head.
        device: device to run on.
        seconds: approximate duration of each measurement; there are two per part.
        limit_s: start no head after this many seconds.

    Yields:
        The part that was measured, and all results so far.
    """
    for head in heads:
        if head not in COMPARED:
            raise CaasegError(f"--heads has {head!r}; expected any of {', '.join(COMPARED)}")
    check_installed("mmsegmentation's heads are measured")
    start = time.monotonic()
    parts = [Part(head, mode, ours) for mode in modes for head in heads for ours in (True, False)]
    costs = HeadCosts({}, {}, list(parts))
    for part in parts:
        if limit_s is not None and part.ours and time.monotonic() - start > limit_s:
            return
        options = mmseg_settings(part.head)
        costs.left.remove(part)
        try:
            costs.measured[part] = measure_model(
                part.model,
                setting._replace(output_stride=options["output_stride"], aux=options["aux"]),
                device,
                seconds=seconds,
                options=options if part.ours else {},
            )
        except Exception as error:  # any library may fail in any way; the other parts are independent
            costs.failed[part] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield part, costs


def ratios(costs: HeadCosts) -> dict[Mode, dict[str, dict[str, float]]]:
    """Return ours divided by mmsegmentation's, by mode and head: speeds (above 1 is faster) and memory."""
    found: dict[Mode, dict[str, dict[str, float]]] = {}
    for part, ours in costs.measured.items():
        theirs = costs.measured.get(part._replace(ours=False)) if part.ours else None
        if theirs is None:
            continue
        pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in RATIOS}
        found.setdefault(part.mode, {})[part.head] = {
            name: one / other for name, (one, other) in pairs.items() if one is not None and other is not None
        }
    return found


def geometric_means(costs: HeadCosts) -> dict[Mode, dict[str, float]]:
    """Return the geometric means of the ratios over the heads, by mode."""
    means: dict[Mode, dict[str, float]] = {}
    for mode, by_head in ratios(costs).items():
        columns = {name: [found[name] for found in by_head.values() if name in found] for name in RATIOS}
        means[mode] = {name: geometric_mean(values) for name, values in columns.items() if values}
    return means


def as_json(costs: HeadCosts) -> dict[str, Any]:
    """Return the measurements as plain values."""
    return {
        "models": [cost._asdict() for cost in costs.measured.values()],
        "settings": {part.head: mmseg_settings(part.head) for part in costs.measured},
        "ratios": ratios(costs),
        "geometric_means": geometric_means(costs),
        "failed": {part.model: message for part, message in costs.failed.items()},
        "not_started": [part.model for part in costs.left],
    }
