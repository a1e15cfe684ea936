"""Memory checks before training starts.

A GPU raises an error if a step does not fit; `try_step` provokes it before the first step. On a CPU the system kills a
process that uses too much memory, so requests that cannot fit are refused in advance.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from caaseg.config import Recipe
from caaseg.data.cache import CachedDataset
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError
from caaseg.models import Segmenter
from caaseg.models.cuda_graphs import preserve_state
from caaseg.models.resize import upsampled_side


def try_step(
    model: Segmenter, compute_loss: Callable[[], Tensor], num_optimizer_states: int, recipe: Recipe, crops: int
) -> None:
    """Compute the gradients of one step and allocate the optimizer state, then discard everything.

    Batch statistics and random numbers are restored. All ranks must call it: batch norm may be synchronized.

    Args:
        model: the model to train.
        compute_loss: forward and loss of a batch of the real size.
        num_optimizer_states: tensors per parameter that the optimizer will allocate.
        recipe: the settings of the run, for the message.
        crops: crops per forward pass.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with explain_out_of_memory(lambda: "before the first step", recipe, crops), preserve_state(model):
        states = [torch.empty_like(parameter) for _ in range(num_optimizer_states) for parameter in parameters]
        torch.autograd.grad(compute_loss(), parameters, allow_unused=True)
        del states


@contextmanager
def explain_out_of_memory(when: Callable[[], str], recipe: Recipe, crops: int) -> Iterator[None]:
    """Turn torch.OutOfMemoryError into a CaasegError that says when it happened and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CaasegError(out_of_memory_message(when(), recipe, crops)) from error


def check_step_fits(recipe: Recipe, crops: int, num_classes: int) -> None:
    """Raise CaasegError if a step needs more than the memory of this machine."""
    needed, total = min_step_bytes(recipe, crops, num_classes), total_bytes()
    if total is not None and needed > total:
        raise CaasegError(
            f"{out_of_memory_message('before the first step', recipe, crops)} "
            f"(they need at least {needed / 1e9:,.1f} GB, and this machine has {total / 1e9:,.1f} GB)"
        )


def check_cache_fits(needed: int, processes: int, cache: bool | str = True) -> None:
    """Raise CaasegError if the cached datasets of all processes on this machine need more than the free memory.

    Args:
        needed: bytes of the datasets.
        processes: number of processes on this machine, each with its own copy.
        cache: value of data.cache; with "device", the images are decoded in the memory of the machine, too.
    """
    available = available_bytes()
    if available is not None and processes * needed > available:
        times = f" per process, in {processes} processes," if processes > 1 else ""
        raise CaasegError(
            f"data.cache is {str(cache).lower()}, but the decoded images need about {needed / 1e9:,.1f} GB{times} and "
            f"{available / 1e9:,.1f} GB of memory are free; set data.cache false to read them from their files in each "
            "step"
        )


def move_to_device(dataset: SegmentationDataset, device: torch.device) -> CachedDataset:
    """Return a cached dataset in the memory of a device. Raises CaasegError if it does not fit there.

    Call it after `try_step`, when the memory of a step is reserved.
    """
    assert isinstance(dataset, CachedDataset)
    if device.type == "cuda":
        check_device_cache_fits(dataset.nbytes, torch.cuda.mem_get_info(device)[0], str(device))
    return dataset.to(device)


def check_device_cache_fits(needed: int, free: int, device: str) -> None:
    """Raise CaasegError if a cached dataset needs more than the free memory of a device."""
    if needed > free:
        raise CaasegError(
            f"data.cache is device, but the decoded training images need {needed:,} bytes and {free:,} bytes are free "
            f"on {device}; set data.cache true to hold them in the memory of the machine, or false to read their files"
        )


def out_of_memory_message(when: str, recipe: Recipe, crops: int) -> str:
    """Return the error message for a step that does not fit in memory."""
    height, width = recipe.data.crop
    return (
        f"{when}: {crops} crops of {height} x {width} do not fit in the memory of the device; set a smaller data.crop "
        "or batch_size, a larger accumulate, or precision bf16"
    )


def min_step_bytes(recipe: Recipe, crops: int, num_classes: int) -> int:
    """Return a lower bound of the bytes of a step: crops, labels, logits at full size and the head's features."""
    (height, width), model = recipe.data.crop, recipe.model
    value = 4 if recipe.precision == "32" else 2
    inputs = height * width * ((3 + num_classes) * value + 1)
    rows, columns = (upsampled_side(side, model.input_upsampling) for side in (height, width))
    upsampled = rows * columns * 3 * value if model.input_upsampling > 1 else 0
    features = -(-rows // model.output_stride) * -(-columns // model.output_stride) * model.channels * 2
    return crops * (inputs + upsampled + features)


def total_bytes() -> int | None:
    """Return the memory of this machine, or None if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_bytes() -> int | None:
    """Return the memory that is free now; the total if that is unknown, None if both are unknown."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return total_bytes() if found is None else 1024 * int(found[1])
