"""Settings every test shares."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels run on the processor

# First tensor calls are slow, and slower on a busy machine: no test may fail by the clock.
settings.register_profile("caaseg", deadline=None, max_examples=40)
settings.load_profile("caaseg")

torch.set_num_threads(1)  # tests run side by side, one process a core
