"""Whether a step, or a dataset that is to be kept, can fit in memory at all: told before anything is read or made.

A GPU says itself that it is full, when a step is tried before the first (`TrainingModule.rehearse`). A CPU does not:
the system ends a process that asks for too much, so what can be told beforehand is.
"""

import os
import re
from pathlib import Path

from caaseg.config import Recipe
from caaseg.models.resize import upsampled_side

FLOAT_BYTES = 4


def least_bytes(recipe: Recipe, crops: int, num_classes: int) -> int:
    """Bytes that a step needs whatever the network: a lower bound, far below what it takes.

    They are the crops and their labels, the crops enlarged, the logits at the size of the crops, and the feature of the
    head, each once. Gradients, the backbone and the weights come on top.
    """
    (height, width), model = recipe.data.crop, recipe.model
    value = FLOAT_BYTES if recipe.precision == "32" else FLOAT_BYTES // 2
    given = height * width * ((3 + num_classes) * value + 1)
    rows, columns = (upsampled_side(side, model.input_upsampling) for side in (height, width))
    larger = rows * columns * 3 * value if model.input_upsampling > 1 else 0
    features = -(-rows // model.output_stride) * -(-columns // model.output_stride) * model.channels * FLOAT_BYTES // 2
    return crops * (given + larger + features)


def memory_bytes() -> int | None:
    """The memory of this machine, all of it; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_bytes() -> int | None:
    """The memory that can be taken now; all of it where the system tells no more, None where it tells nothing."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return memory_bytes() if found is None else 1024 * int(found[1])


def check_cache_fits(needed: int, processes: int) -> None:
    """Refuse to keep data that need more than the memory there is, in each of so many processes of this machine."""
    there = available_bytes()
    if there is not None and processes * needed > there:
        times = f"{processes} times, once a process, " if processes > 1 else ""
        raise ValueError(
            f"data.cache is true, but the decoded images take about {needed / 1e9:,.1f} GB {times}and "
            f"{there / 1e9:,.1f} GB of memory are free; set data.cache false to read them from their files in each step"
        )


def check_step_fits(recipe: Recipe, crops: int, num_classes: int) -> None:
    """Refuse crops that need more than all the memory there is."""
    needed, there = least_bytes(recipe, crops, num_classes), memory_bytes()
    if there is not None and needed > there:
        raise ValueError(
            f"{too_large('before the first step', recipe, crops)} "
            f"(they take {needed / 1e9:,.1f} GB at the very least, and there are {there / 1e9:,.1f} GB)"
        )


def too_large(when: str, recipe: Recipe, crops: int) -> str:
    """What is said of a step that does not fit, with what to do."""
    height, width = recipe.data.crop
    return (
        f"{when}: {crops} crops of {height} x {width} do not fit in the memory of the device; set a smaller data.crop "
        "or batch_size, a larger accumulate, or precision bf16"
    )
