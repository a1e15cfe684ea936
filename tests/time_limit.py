"""A time limit for code under test."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLongError(BaseException):
    """Not an Exception, so that no handler in the code under test catches it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TookTooLongError in the block after a number of seconds."""

    def on_alarm(_: int, __: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
