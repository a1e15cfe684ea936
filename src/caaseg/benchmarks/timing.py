"""Time and peak memory of a function, on CPU or GPU."""

import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Cost(NamedTuple):
    """Time and memory of one call."""

    seconds: float  # median of the repeats on a GPU, minimum on a CPU
    peak_bytes: int  # peak memory of all live tensors, inputs included


class LiveTensors(TorchDispatchMode):
    """Count the bytes of all live tensors on the CPU, whose allocator does not report a peak.

    Args:
        tensors: tensors that are alive at the start.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: set[int] = set()
        self.current_bytes = 0
        self.peak_bytes = 0
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # shared by views
        address, size = storage.data_ptr(), storage.nbytes()
        if address == 0 or address in self._alive:
            return
        self._alive.add(address)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.current_bytes -= size


def measure(
    work: Callable[[], object],
    inputs: Iterable[Tensor],
    device: torch.device,
    *,
    seconds: float = 0.5,
    max_repeats: int = 100,
) -> Cost:
    """Measure time and peak memory of `work` after a warm-up.

    Args:
        work: function to measure; called many times.
        inputs: tensors that it uses; their bytes count towards the peak.
        device: device that it runs on.
        seconds: approximate duration of the repeats.
        max_repeats: maximum number of repeats.
    """
    inputs = list(inputs)
    start = time.perf_counter()
    for _ in range(3):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    repeats = _repeats(seconds, (time.perf_counter() - start) / 3, max_repeats)
    timer = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    return Cost(timer(work, repeats), _peak_bytes(work, inputs, device))


def _repeats(seconds: float, once_s: float, max_repeats: int = 100) -> int:
    return min(max(int(seconds / max(once_s, 1e-6)), 3), max_repeats)


def _cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the duration of the fastest repeat; other processes can only slow it down."""
    durations_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        durations_s.append(time.perf_counter() - start)
    return min(durations_s)


def _cuda_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median duration, measured with CUDA events."""
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    durations_s: list[float] = [start.elapsed_time(end) / 1000 for start, end in events]
    return statistics.median(durations_s)


def graph_seconds(work: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the duration of `work` replayed as a CUDA graph, that is, without launch overhead."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return _cuda_seconds(graph.replay, _repeats(seconds, _cuda_seconds(graph.replay, 3)))


def _peak_bytes(work: Callable[[], object], inputs: list[Tensor], device: torch.device) -> int:
    if device.type == "cuda":
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in inputs)}
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before + sum(storages.values())
    live = LiveTensors(inputs)
    with live:
        work()
    return live.peak_bytes
