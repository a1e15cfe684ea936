"""Time and peak memory of one piece of work, on CPU or GPU, and what it was measured on."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import caaseg


class Cost(NamedTuple):
    """What a piece of work took."""

    seconds: float  # once: the median of the repeats on a GPU, the fastest on a CPU
    peak_bytes: int  # most bytes of tensors alive at once, those it was given included


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors alive, for the CPU, whose allocator keeps no record of its peak."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: set[int] = set()
        self.current_bytes = 0
        self.peak_bytes = 0
        for tensor in given:
            self._watch(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # views share one
        address, size = storage.data_ptr(), storage.nbytes()
        if address == 0 or address in self._alive:
            return
        self._alive.add(address)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.current_bytes -= size


def measure(
    work: Callable[[], object],
    given: Iterable[Tensor],
    device: torch.device,
    *,
    seconds: float = 0.5,
    most_repeats: int = 100,
) -> Cost:
    """Time and peak memory of `work`, warmed up, then repeated for about `seconds`.

    Args:
        work: what to measure; it is called many times.
        given: tensors it works on, whose bytes count as part of its peak.
        device: where it runs.
        seconds: about how long to repeat.
        most_repeats: not more often than this.
    """
    given = list(given)
    started = time.perf_counter()
    for _ in range(3):
        work()
    _wait(device)
    once_s = max((time.perf_counter() - started) / 3, 1e-6)
    repeats = min(max(int(seconds / once_s), 3), most_repeats)
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    return Cost(clock(work, repeats), _peak_bytes(work, given, device))


def _cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest repeat: whatever else a machine does can only add to it."""
    durations_s = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        durations_s.append(time.perf_counter() - started)
    return min(durations_s)


def _cuda_seconds(work: Callable[[], object], repeats: int) -> float:
    """The median repeat, by the GPU's own clock."""
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
    """How long work takes a GPU when it is replayed as a CUDA graph, without the time of launching it."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    once_s = max(_cuda_seconds(graph.replay, 3), 1e-6)
    return _cuda_seconds(graph.replay, min(max(int(seconds / once_s), 3), 100))


def _peak_bytes(work: Callable[[], object], given: list[Tensor], device: torch.device) -> int:
    if device.type == "cuda":
        given_bytes = sum(
            {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in given)}.values()  # views share one
        )
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before + given_bytes
    live = LiveTensors(given)
    with live:
        work()
    return live.peak_bytes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def provenance(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """What a figure was measured on: hardware, versions, command and commit."""
    return {
        "command": shlex.join(["caaseg", *arguments]),
        "commit": _commit(),
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "caaseg": caaseg.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def _commit() -> str | None:
    """The checkout's commit, with "+changes" where tracked files differ from it; None outside a checkout."""
    if given := os.environ.get("CAASEG_COMMIT"):  # for a copy of the tree without its history
        return given
    folder = Path(caaseg.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", caaseg.__file__)  # an installed copy inside some other checkout is not it
        return git("rev-parse", "HEAD").strip() + ("+changes" if git("diff", "HEAD", "--stat") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
