"""Time, peak memory, out-of-memory errors and provenance."""

import time

import pytest
import torch

from caaseg.benchmarks.provenance import provenance
from caaseg.benchmarks.timing import measure
from caaseg.models.inference import is_out_of_memory

CPU = torch.device("cpu")


def test_peak_memory_counts_live_tensors() -> None:
    source = torch.ones(1000)  # 4,000 bytes

    def work() -> torch.Tensor:
        doubled = source * 2  # 8,000 alive
        tripled = doubled * 3  # 12,000 alive
        del doubled  # 8,000
        return tripled + source  # 12,000

    assert measure(work, [source], CPU, seconds=0, max_repeats=3).peak_bytes == 12_000


def test_peak_memory_counts_tensors_saved_for_backward() -> None:
    source = torch.ones(1000, requires_grad=True)

    def work() -> tuple[torch.Tensor, ...]:
        output = source.exp().exp()  # saves both results
        return torch.autograd.grad(output.sum(), [source])

    peak = measure(work, [source], CPU, seconds=0, max_repeats=3).peak_bytes
    assert 4 * 4000 <= peak <= 6 * 4000 + 64  # input, two saved results, temporary gradients


def test_views_and_in_place_operations_count_once() -> None:
    source = torch.ones(1000)

    def work() -> torch.Tensor:
        return source.view(10, 100).t()[2:5].add_(1)

    assert measure(work, [source, source.view(100, 10)], CPU, seconds=0, max_repeats=3).peak_bytes == 4000


def test_time_is_positive_and_grows_with_the_work() -> None:
    small, large = torch.randn(16, 16), torch.randn(600, 600)
    quick = measure(lambda: small @ small, [small], CPU, seconds=0.05)
    slow = measure(lambda: large @ large, [large], CPU, seconds=0.05)
    assert 0 < quick.seconds < slow.seconds


def test_time_on_a_cpu_is_that_of_the_fastest_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes can only slow it down."""
    now, durations = 0.0, [1.0, 1.0, 1.0, 5.0, 2.0, 9.0, 1.0]  # warm-up, repeats, and a call that measures memory

    def work() -> None:
        nonlocal now
        now += durations.pop(0)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert measure(work, [], CPU, max_repeats=3).seconds == 2


def test_provenance_names_hardware_versions_command_and_commit() -> None:
    origin = provenance(CPU, ["benchmark", "attention"])
    assert origin["command"] == "caaseg benchmark attention"
    assert origin["versions"]["torch"] == torch.__version__
    assert origin["hardware"]["cores"] >= 1
    assert "commit" in origin


@pytest.mark.parametrize("shape", [(10**14,), (2**40, 2**40)])
def test_failed_allocations_are_out_of_memory(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(shape)
    assert is_out_of_memory(error.value)


@pytest.mark.parametrize("message", ["value cannot be converted to int8_t without overflow", "shapes do not match"])
def test_other_errors_are_not_out_of_memory(message: str) -> None:
    assert not is_out_of_memory(RuntimeError(message))
