"""Settings that all tests share."""

import ctypes
import os
import signal
import sys
import threading

import pytest
import torch
from hypothesis import settings

from tests.properties import EXAMPLES, EXPLORE_FACTOR

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels run on the CPU

# Tests run in parallel, one process per core. Processes that a test starts also use one thread.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# A test that hangs ends its process after `faulthandler_timeout`. Forked children, such as data workers, have inherited
# its connection to pytest-xdist, which would wait for them. So they end with it.
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_forks_in_main_thread = False


def _before_fork() -> None:
    global _forks_in_main_thread
    _forks_in_main_thread = threading.current_thread() is threading.main_thread()


def _end_with_parent() -> None:
    if _forks_in_main_thread:  # the signal is sent when the thread that has forked ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if sys.platform == "linux":
    os.register_at_fork(before=_before_fork, after_in_child=_end_with_parent)

# The first tensor operations are slow, and slower on a busy machine: no test fails because of its duration.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=EXAMPLES)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=EXPLORE_FACTOR * EXAMPLES)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--explore",
        action="store_true",
        help=f"property tests (-m hypothesis) with random seeds and {EXPLORE_FACTOR} times the examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("explore" if config.getoption("--explore") else "repeatable")
