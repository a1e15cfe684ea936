"""Signals that stop a run after a step."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from caaseg.training.ranks import sum_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that stop a run after a step."""


class StopSignals:
    """Turns SIGTERM and SIGINT into a request to stop after a step, the same step on all ranks.

    A second Ctrl-C interrupts at once. Handlers are restored at the end.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.signal: int | None = None
        self._ranks, self._device = ranks, device
        self._votes: Tensor | None = None  # number of ranks that got each of SIGNALS, one step ago
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
            self._handlers = {number: signal.signal(number, self._stop) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self) -> bool:
        """Return whether all ranks stop after this step. Ranks vote; votes are read a step later, without waiting."""
        if self._ranks == 1:
            return self.signal is not None
        got = (
            [] if self._votes is None else [number for number, votes in zip(SIGNALS, self._votes, strict=True) if votes]
        )
        self._votes = sum_over_ranks(torch.tensor([int(self.signal == number) for number in SIGNALS]).to(self._device))
        if got:
            self.signal = got[0]  # the same on all ranks, which may have got different signals
        return bool(got)
