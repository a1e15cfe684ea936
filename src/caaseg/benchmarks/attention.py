"""Benchmark of channelized axial attention: time, memory and error of every implementation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from caaseg.attention import ChannelGate, axial_attention, channelized_axial_attention
from caaseg.benchmarks.timing import graph_seconds, measure
from caaseg.models.inference import is_out_of_memory

# Largest relative (Frobenius) error of the output against float64 that counts as rounding; twice that for gradients.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

Implementation = Literal["axial", "fused", "factorised", "grouped", "loop"]
"""The implementations of channelized attention, and "axial": plain axial attention without gates, as a lower bound."""
OURS = ("factorised", "fused")


Workload = tuple[int, int, int, str]
"""Batch, height, width and dtype."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark case: input shape, dtype and implementation."""

    batch: int
    height: int
    width: int
    channels: int
    key_channels: int
    dtype: str
    implementation: Implementation
    groups: int | None  # for "grouped" only

    @property
    def workload(self) -> Workload:
        """Shape and dtype; cases of one workload are compared with each other."""
        return self.batch, self.height, self.width, self.dtype

    @property
    def label(self) -> str:
        return self.implementation if self.groups is None else f"grouped, {self.groups}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of one case. If memory ran out, `out_of_memory` is True and the numbers are None."""

    case: Case
    out_of_memory: bool = False
    forward_ms: float | None = None
    forward_graph_ms: float | None = None  # replayed as a CUDA graph, without launch overhead
    floor_ms: float | None = None  # time to move the bytes that every implementation must move, as a CUDA graph
    forward_peak_bytes: int | None = None
    training_ms: float | None = None  # forward and backward
    training_graph_ms: float | None = None  # the same, replayed as a CUDA graph
    training_floor_ms: float | None = None  # lower bound of forward and backward, as a CUDA graph
    training_peak_bytes: int | None = None
    given_bytes: int | None = None  # keys, values and output gradient; part of the training peak
    error: float | None = None  # relative error of the output against float64
    gradient_error: float | None = None  # largest relative error among the gradients of keys and values

    @property
    def agrees(self) -> bool:
        """Whether the errors are within the rounding of the dtype."""
        if self.error is None or self.gradient_error is None:
            return self.out_of_memory
        allowed = TOLERANCE[getattr(torch, self.case.dtype)]
        return self.error <= allowed and self.gradient_error <= 2 * allowed


def cases(
    sizes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[str],
    implementations: Sequence[Implementation],
    groups: Sequence[int],
    *,
    channels: int,
    key_channels: int,
) -> list[Case]:
    """Return all combinations. Numbers of groups apply to "grouped" only, up to the length of the longer axis."""

    def group_options(implementation: Implementation, longest: int) -> list[int | None]:
        return [None] if implementation != "grouped" else [g for g in groups if g <= longest] or [longest]

    return [
        Case(
            batch=batch,
            height=height,
            width=width,
            channels=channels,
            key_channels=key_channels,
            dtype=dtype,
            implementation=implementation,
            groups=group,
        )
        for (batch, height, width), dtype, implementation in product(sizes, dtypes, implementations)
        for group in group_options(implementation, max(height, width))
    ]


@dataclass(frozen=True)
class Problem:
    """Random inputs and gates of one workload, with reference results in float64."""

    maps: tuple[Tensor, Tensor, Tensor]  # column keys, row keys (N, D, H, W); values (N, C, H, W); channels last
    gates: tuple[ChannelGate, ChannelGate]
    cotangent: Tensor  # (N, C, H, W)
    expected: dict[bool, list[Tensor]] = field(default_factory=dict)  # by `gated`: output and three gradients

    @classmethod
    def random(cls, case: Case, device: torch.device, seed: int = 0) -> "Problem":
        """Draw inputs for the workload of a case."""
        dtype = getattr(torch, case.dtype)
        rng = torch.Generator(device).manual_seed(seed)

        def draw(channels: int) -> Tensor:
            shape = (case.batch, channels, case.height, case.width)
            values = torch.randn(shape, generator=rng, device=device).to(dtype)
            return values.contiguous(memory_format=torch.channels_last)

        # Keys have a norm of about 2, so that attention is neither uniform nor one-hot.
        keys = [draw(case.key_channels) * 2 / case.key_channels**0.5 for _ in range(2)]
        values, cotangent = draw(case.channels), draw(case.channels)
        torch.manual_seed(seed)
        gates = tuple(ChannelGate(case.channels).to(device, dtype) for _ in range(2))
        maps = (keys[0].requires_grad_(), keys[1].requires_grad_(), values.requires_grad_())
        return cls(maps, (gates[0], gates[1]), cotangent)

    def reference(self, gated: bool) -> list[Tensor]:
        """Return output and gradients in float64, cached."""
        if gated not in self.expected:
            a, b, v = maps = [m.detach().double().requires_grad_() for m in self.maps]
            gates = [ChannelGate(self.maps[2].shape[1]).to(self.cotangent) for _ in range(2)]
            for double, gate in zip(gates, self.gates, strict=True):
                double.load_state_dict(gate.state_dict())
                double.double()
            output = channelized_axial_attention(a, b, v, *gates) if gated else axial_attention(a, b, v)
            self.expected[gated] = [output.detach(), *torch.autograd.grad(output, maps, self.cotangent.double())]
        return self.expected[gated]


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    seconds: float = 0.5,
    function: Callable[..., Tensor] = channelized_axial_attention,
) -> Iterator[Measurement]:
    """Measure the cases in order. Cases of one workload get the same inputs.

    Args:
        cases: cases to measure.
        device: device to run on.
        seconds: approximate duration of each measurement.
        function: function to measure, with the arguments of `channelized_axial_attention`.
    """
    problem, workload = None, None
    for case in cases:
        try:
            if problem is None or case.workload != workload:
                problem, workload = Problem.random(case, device), case.workload
            yield _measure(case, problem, device, seconds, function)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            yield Measurement(case=case, out_of_memory=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    case: Case, problem: Problem, device: torch.device, seconds: float, function: Callable[..., Tensor]
) -> Measurement:
    gated = case.implementation != "axial"
    parameters = [p for gate in problem.gates for p in gate.parameters()] if gated else []
    attend: Callable[[], Tensor]
    if gated:
        options = {"implementation": case.implementation, "groups": case.groups or 1}
        attend = partial(function, *problem.maps, *problem.gates, **options)
    else:
        attend = partial(axial_attention, *problem.maps)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def training() -> tuple[Tensor, ...]:
        output = attend()
        return (output, *torch.autograd.grad(output, [*problem.maps, *parameters], problem.cotangent))

    errors = [
        _relative_error(ours, expected) for ours, expected in zip(training()[:4], problem.reference(gated), strict=True)
    ]
    if device.type == "cuda":
        problem.expected.clear()  # frees the float64 tensors before the measurement
    forward_cost = measure(forward, [*problem.maps, *parameters], device, seconds=seconds)
    training_cost = measure(training, [*problem.maps, *parameters, problem.cotangent], device, seconds=seconds)
    graph_ms = floor_ms = training_graph_ms = training_floor_ms = None
    if device.type == "cuda" and case.implementation not in ("grouped", "loop"):
        graph_ms, training_graph_ms = (graph_seconds(work, seconds) * 1000 for work in (forward, training))
        floor_ms = floor_seconds(problem, moved_bytes(problem), seconds) * 1000
        training_floor_ms = floor_seconds(problem, moved_bytes(problem, backward=True), seconds) * 1000
    return Measurement(
        case=case,
        forward_ms=forward_cost.seconds * 1000,
        forward_graph_ms=graph_ms,
        floor_ms=floor_ms,
        forward_peak_bytes=forward_cost.peak_bytes,
        training_ms=training_cost.seconds * 1000,
        training_graph_ms=training_graph_ms,
        training_floor_ms=training_floor_ms,
        training_peak_bytes=training_cost.peak_bytes,
        given_bytes=sum(tensor.nbytes for tensor in (*problem.maps, problem.cotangent)),
        error=errors[0],
        gradient_error=max(errors[1:]),
    )


def _relative_error(ours: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the error, relative to the expected tensor unless that is zero.

    The gradient of keys is zero for lines of a single pixel, whose softmax is constant.
    """
    error, norm = (ours.double() - expected).norm(), expected.norm()
    relative: float = (error / norm if norm else error).item()
    return relative


def moved_bytes(problem: Problem, *, backward: bool = False) -> int:
    """Return the bytes that every implementation must move, forward or forward and backward.

    Forward, it reads both keys and the values, writes and reads the column result, and writes the output. Backward, it
    reads the output gradient, both keys, the values and the column result, writes and reads the gradient of the column
    result, and writes the gradients of keys and values. Each is counted once, as if gates and pools needed no reads.
    """
    column_keys, row_keys, values = problem.maps
    keys = column_keys.nbytes + row_keys.nbytes
    forward = keys + 4 * values.nbytes
    return forward + 2 * keys + 6 * values.nbytes if backward else forward


def floor_seconds(problem: Problem, moved: int, seconds: float) -> float:
    """Return the time to move a number of bytes, as a CUDA graph."""
    values = problem.maps[2]
    source = values.new_empty(moved // 2 // values.element_size())  # each byte is read and written
    target = torch.empty_like(source)
    return graph_seconds(lambda: torch.neg(source, out=target), seconds)  # faster than torch's copy


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return the case and its numbers as one flat dictionary."""
    record = asdict(measurement)
    return {**record.pop("case"), **record, "agrees": measurement.agrees}


def ratios(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return speedups and memory ratios: one record per workload and implementation of ours, and one for the loop.

    The paper states for 33 x 33 maps that the row-by-row loop is about 2.5 times slower than full vectorization, and
    that full vectorization takes about twice the memory of the loop.
    """
    records = []
    by_workload: dict[Workload, dict[tuple[str, int | None], Measurement]] = {}
    for measurement in measurements:
        case = measurement.case
        by_workload.setdefault(case.workload, {})[case.implementation, case.groups] = measurement
    for (batch, height, width, dtype), others in by_workload.items():
        workload = {"batch": batch, "height": height, "width": width, "dtype": dtype}
        for implementation in OURS:
            ours = others.get((implementation, None))
            if ours is not None:
                records.append({**workload, "implementation": implementation, **_compare(ours, others)})
        loop, full = others.get(("loop", None)), others.get(("grouped", 1))
        if loop is not None and full is not None:
            record = {
                "row_by_row_over_vectorized_time": _ratio(loop.forward_ms, full.forward_ms),
                "vectorized_over_row_by_row_forward_memory": _ratio(full.forward_peak_bytes, loop.forward_peak_bytes),
                "vectorized_over_row_by_row_training_memory": _ratio(
                    full.training_peak_bytes, loop.training_peak_bytes
                ),
            }
            if (height, width) == (33, 33):
                record["paper_row_by_row_over_vectorized_time"] = 2.5
                record["paper_vectorized_over_row_by_row_memory"] = 2.0
            records.append({**workload, "implementation": "loop", **record})
    return records


def _compare(ours: Measurement, others: dict[tuple[str, int | None], Measurement]) -> dict[str, float | None]:
    """Compare one of our implementations with the paper's, with plain axial attention and with the lower bound."""
    record: dict[str, float | None] = {}
    for (implementation, groups), other in others.items():
        if implementation in ("grouped", "loop"):
            name = implementation if groups is None else f"grouped_{groups}"
            record[f"forward_speedup_over_{name}"] = _ratio(other.forward_ms, ours.forward_ms)
            record[f"training_speedup_over_{name}"] = _ratio(other.training_ms, ours.training_ms)
            if ours.training_graph_ms is not None:  # grouped and loop are not limited by launches
                record[f"forward_graph_speedup_over_{name}"] = _ratio(other.forward_ms, ours.forward_graph_ms)
                record[f"training_graph_speedup_over_{name}"] = _ratio(other.training_ms, ours.training_graph_ms)
            record[f"training_memory_of_{name}"] = _ratio(other.training_peak_bytes, ours.training_peak_bytes)
    plain = others.get(("axial", None))
    if plain is not None:
        record["forward_time_over_axial"] = _ratio(ours.forward_ms, plain.forward_ms)
        record["training_time_over_axial"] = _ratio(ours.training_ms, plain.training_ms)
        record["training_memory_over_axial"] = _ratio(ours.training_peak_bytes, plain.training_peak_bytes)
        record["training_memory_over_axial_without_inputs"] = _ratio(_without_inputs(ours), _without_inputs(plain))
    if ours.floor_ms is not None:
        record["forward_graph_over_floor"] = _ratio(ours.forward_graph_ms, ours.floor_ms)
        record["training_graph_over_floor"] = _ratio(ours.training_graph_ms, ours.training_floor_ms)
    return record


def _without_inputs(measurement: Measurement) -> int | None:
    """Return the peak training memory without the inputs."""
    if measurement.training_peak_bytes is None or measurement.given_bytes is None:
        return None
    return measurement.training_peak_bytes - measurement.given_bytes


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator
