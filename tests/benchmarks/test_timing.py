"""Costs are what they should be where they can be told by hand."""

import torch

from caaseg.benchmarks.timing import measure, provenance

CPU = torch.device("cpu")


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    given = torch.ones(1000)  # 4,000 bytes

    def work() -> torch.Tensor:
        doubled = given * 2  # 8,000 alive
        tripled = doubled * 3  # 12,000 alive
        del doubled  # 8,000
        return tripled + given  # 12,000

    assert measure(work, [given], CPU, seconds=0, most_repeats=3).peak_bytes == 12_000


def test_peak_memory_counts_what_backward_keeps() -> None:
    given = torch.ones(1000, requires_grad=True)

    def work() -> tuple[torch.Tensor, ...]:
        output = given.exp().exp()  # keeps both results
        return torch.autograd.grad(output.sum(), [given])

    peak = measure(work, [given], CPU, seconds=0, most_repeats=3).peak_bytes
    assert 4 * 4000 <= peak <= 6 * 4000 + 64  # given, two kept results, gradients on the way


def test_views_and_in_place_work_count_once() -> None:
    given = torch.ones(1000)

    def work() -> torch.Tensor:
        return given.view(10, 100).t()[2:5].add_(1)

    assert measure(work, [given, given.view(100, 10)], CPU, seconds=0, most_repeats=3).peak_bytes == 4000


def test_time_is_positive_and_grows_with_the_work() -> None:
    small, large = torch.randn(16, 16), torch.randn(600, 600)
    quick = measure(lambda: small @ small, [small], CPU, seconds=0.05)
    slow = measure(lambda: large @ large, [large], CPU, seconds=0.05)
    assert 0 < quick.seconds < slow.seconds


def test_provenance_names_hardware_versions_command_and_commit() -> None:
    origin = provenance(CPU, ["benchmark", "attention"])
    assert origin["command"] == "caaseg benchmark attention"
    assert origin["versions"]["torch"] == torch.__version__
    assert origin["hardware"]["cores"] >= 1
    assert "commit" in origin
