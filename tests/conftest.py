"""Settings that all tests share."""

import os

import pytest
import torch
from hypothesis import settings

from tests.properties import EXAMPLES, EXPLORE_FACTOR

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels run on the CPU

# Tests run in parallel, one process per core. Processes that a test starts also use one thread.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

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
