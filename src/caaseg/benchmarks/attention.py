"""Channelized axial attention, implementation beside implementation: time, memory, and whether they agree."""

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

# Relative (Frobenius) distance from float64 that is rounding, not a mistake: forward; gradients are given twice that.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

Contender = Literal["axial", "fused", "factorised", "grouped", "loop"]
OURS = ("factorised", "fused")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the comparison: what is computed, and how."""

    batch: int
    height: int
    width: int
    channels: int
    key_channels: int
    dtype: str
    implementation: Contender  # "axial" is plain axial attention, without gates: the floor
    groups: int | None  # of "grouped" alone

    @property
    def place(self) -> tuple[int, int, int, str]:
        """What cases that are compared with each other have in common."""
        return self.batch, self.height, self.width, self.dtype

    @property
    def label(self) -> str:
        return self.implementation if self.groups is None else f"grouped, {self.groups}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case measured. Where memory ran out, `out_of_memory` is True and the rest is None."""

    case: Case
    out_of_memory: bool = False
    forward_ms: float | None = None
    forward_graph_ms: float | None = None  # replayed as a CUDA graph: the GPU's time alone
    floor_ms: float | None = None  # to move the bytes that any implementation must, measured beside, as a CUDA graph
    forward_peak_bytes: int | None = None
    training_ms: float | None = None  # forward and backward
    training_peak_bytes: int | None = None
    given_bytes: int | None = None  # of the keys, values and output gradient, part of the training peak
    error: float | None = None  # relative distance of the output from float64
    gradient_error: float | None = None  # the largest such distance among the gradients of keys and values

    @property
    def agrees(self) -> bool:
        """Whether it gave the numbers of the float64 computation, as far as its dtype can."""
        if self.error is None or self.gradient_error is None:
            return self.out_of_memory
        allowed = TOLERANCE[getattr(torch, self.case.dtype)]
        return self.error <= allowed and self.gradient_error <= 2 * allowed


def cases(
    sizes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[str],
    contenders: Sequence[Contender],
    groups: Sequence[int],
    *,
    channels: int,
    key_channels: int,
) -> list[Case]:
    """Every combination that means something: group numbers go with "grouped", up to the longer axis."""

    def slices(implementation: Contender, longest: int) -> list[int | None]:
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
        for (batch, height, width), dtype, implementation in product(sizes, dtypes, contenders)
        for group in slices(implementation, max(height, width))
    ]


@dataclass(frozen=True)
class Problem:
    """Random inputs and gates of one size and dtype, and what float64 makes of them."""

    maps: tuple[Tensor, Tensor, Tensor]  # column keys, row keys (N, D, H, W); values (N, C, H, W); channels last
    gates: tuple[ChannelGate, ChannelGate]
    cotangent: Tensor  # (N, C, H, W)
    expected: dict[bool, list[Tensor]] = field(default_factory=dict)  # by "gated": output and three gradients

    @classmethod
    def draw(cls, case: Case, device: torch.device, seed: int = 0) -> "Problem":
        dtype = getattr(torch, case.dtype)
        rng = torch.Generator(device).manual_seed(seed)

        def draw(channels: int) -> Tensor:
            shape = (case.batch, channels, case.height, case.width)
            drawn = torch.randn(shape, generator=rng, device=device).to(dtype)
            return drawn.contiguous(memory_format=torch.channels_last)

        # Keys of length about 2, so that attention is neither uniform nor one-hot.
        keys = [draw(case.key_channels) * 2 / case.key_channels**0.5 for _ in range(2)]
        values, cotangent = draw(case.channels), draw(case.channels)
        torch.manual_seed(seed)
        gates = tuple(ChannelGate(case.channels).to(device, dtype) for _ in range(2))
        maps = (keys[0].requires_grad_(), keys[1].requires_grad_(), values.requires_grad_())
        return cls(maps, (gates[0], gates[1]), cotangent)

    def reference(self, gated: bool) -> list[Tensor]:
        if gated not in self.expected:
            a, b, v = maps = [m.detach().double().requires_grad_() for m in self.maps]
            gates = [ChannelGate(self.maps[2].shape[1]).to(self.cotangent) for _ in range(2)]
            for wide, gate in zip(gates, self.gates, strict=True):
                wide.load_state_dict(gate.state_dict())
                wide.double()
            output = channelized_axial_attention(a, b, v, *gates) if gated else axial_attention(a, b, v)
            self.expected[gated] = [output.detach(), *torch.autograd.grad(output, maps, self.cotangent.double())]
        return self.expected[gated]


def run(
    combinations: Sequence[Case],
    device: torch.device,
    *,
    seconds: float = 0.5,
) -> Iterator[Outcome]:
    """Measure case after case. Cases of one size and dtype see the same numbers.

    Args:
        combinations: what to measure, in order.
        device: where.
        seconds: about how long to repeat each measurement.
    """
    problem, drawn_for = None, None
    for case in combinations:
        try:
            if problem is None or case.place != drawn_for:
                problem, drawn_for = Problem.draw(case, device), case.place
            yield _measure(case, problem, device, seconds)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            yield Outcome(case=case, out_of_memory=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(case: Case, problem: Problem, device: torch.device, seconds: float) -> Outcome:
    gated = case.implementation != "axial"
    parameters = [p for gate in problem.gates for p in gate.parameters()] if gated else []
    attend = _attention(case, problem)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def training() -> tuple[Tensor, ...]:
        output = attend()
        return (output, *torch.autograd.grad(output, [*problem.maps, *parameters], problem.cotangent))

    errors = [
        ((ours.double() - expected).norm() / expected.norm()).item()
        for ours, expected in zip(training()[:4], problem.reference(gated), strict=True)
    ]
    if device.type == "cuda":
        problem.expected.clear()  # float64 maps would only crowd the card while it is measured
    forward_cost = measure(forward, [*problem.maps, *parameters], device, seconds=seconds)
    training_cost = measure(training, [*problem.maps, *parameters, problem.cotangent], device, seconds=seconds)
    graph_ms = floor_ms = None
    if device.type == "cuda" and case.implementation not in ("grouped", "loop"):
        graph_ms, floor_ms = graph_seconds(forward, seconds) * 1000, floor_seconds(problem, seconds) * 1000
    return Outcome(
        case=case,
        forward_ms=forward_cost.seconds * 1000,
        forward_graph_ms=graph_ms,
        floor_ms=floor_ms,
        forward_peak_bytes=forward_cost.peak_bytes,
        training_ms=training_cost.seconds * 1000,
        training_peak_bytes=training_cost.peak_bytes,
        given_bytes=sum(tensor.nbytes for tensor in (*problem.maps, problem.cotangent)),
        error=errors[0],
        gradient_error=max(errors[1:]),
    )


def floor_seconds(problem: Problem, seconds: float) -> float:
    """How long a pass takes that moves the bytes which any implementation must.

    These are both keys and the values read, the column result written and read, the output written.
    """
    column_keys, row_keys, values = problem.maps
    moved = column_keys.nbytes + row_keys.nbytes + 4 * values.nbytes
    source = values.new_empty(moved // 2 // values.element_size())  # each byte is read and written
    target = torch.empty_like(source)
    return graph_seconds(lambda: torch.neg(source, out=target), seconds)  # torch's own copy moves bytes more slowly


def _attention(case: Case, problem: Problem) -> Callable[[], Tensor]:
    if case.implementation == "axial":
        return partial(axial_attention, *problem.maps)
    return partial(
        channelized_axial_attention,
        *problem.maps,
        *problem.gates,
        implementation=case.implementation,
        groups=case.groups or 1,
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """One flat record: the case, what was measured, and whether the numbers agree."""
    record = asdict(outcome)
    return {**record.pop("case"), **record, "agrees": outcome.agrees}


def ratios(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What the run says, a record a size, dtype and form of ours: against the others, the paper's claims beside.

    The paper says of 33x33 maps that going row by row is about 2.5 times slower than full vectorization, and that
    full vectorization takes about twice the memory of none.
    """
    found = []
    by_place: dict[tuple[int, int, int, str], dict[tuple[str, int | None], Outcome]] = {}
    for outcome in outcomes:
        by_place.setdefault(outcome.case.place, {})[(outcome.case.implementation, outcome.case.groups)] = outcome
    for (batch, height, width, dtype), here in by_place.items():
        place = {"batch": batch, "height": height, "width": width, "dtype": dtype}
        for form in OURS:
            ours = here.get((form, None))
            if ours is not None:
                found.append({**place, "implementation": form, **_against(ours, here)})
        loop, full = here.get(("loop", None)), here.get(("grouped", 1))
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
            found.append({**place, "implementation": "loop", **record})
    return found


def _against(ours: Outcome, here: dict[tuple[str, int | None], Outcome]) -> dict[str, float | None]:
    """One of our forms against the paper's ways, plain axial attention and the floor."""
    record: dict[str, float | None] = {}
    for (implementation, groups), other in here.items():
        if implementation in ("grouped", "loop"):
            name = implementation if groups is None else f"grouped_{groups}"
            record[f"forward_speedup_over_{name}"] = _ratio(other.forward_ms, ours.forward_ms)
            record[f"training_speedup_over_{name}"] = _ratio(other.training_ms, ours.training_ms)
            record[f"training_memory_of_{name}"] = _ratio(other.training_peak_bytes, ours.training_peak_bytes)
    plain = here.get(("axial", None))
    if plain is not None:
        record["forward_time_over_axial"] = _ratio(ours.forward_ms, plain.forward_ms)
        record["training_time_over_axial"] = _ratio(ours.training_ms, plain.training_ms)
        record["training_memory_over_axial"] = _ratio(ours.training_peak_bytes, plain.training_peak_bytes)
        record["training_memory_over_axial_without_inputs"] = _ratio(_above(ours), _above(plain))
    if ours.floor_ms is not None:
        record["forward_graph_over_floor"] = _ratio(ours.forward_graph_ms, ours.floor_ms)
    return record


def _above(outcome: Outcome) -> int | None:
    """Peak training memory above what was there before."""
    if outcome.training_peak_bytes is None or outcome.given_bytes is None:
        return None
    return outcome.training_peak_bytes - outcome.given_bytes


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator
