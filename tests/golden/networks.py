"""Golden files of whole networks: their weights by formula, and comparison with their feature maps."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from caaseg.models.authors_weights import torch_name, torch_weight
from tests.golden.weights_by_formula import image, weight

GOLDEN = Path(__file__).parent
TOLERANCE = 5e-5  # of the largest value; independent ports differ by 4e-6, the weakest mistake by 6e-4


def load(name: str) -> dict[str, Any]:
    """Return the arrays of a golden file by name."""
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return {key: stored[key] for key in stored.files}


def load_formula_weights(
    module: nn.Module, stored: dict[str, Any], *, prefix: str, blocks: Any = (), check: bool = True
) -> None:
    """Load the weights of a golden file.

    Args:
        module: the model, or its backbone.
        stored: a golden file with variable names.
        prefix: name of the module in a `Segmenter`, such as "backbone.".
        blocks: stages of an EfficientNet.
        check: compare with the first value of each variable; not if the seed is of another file than the names.
    """
    seed, stages = int(stored["seed"]), [len(stage) for stage in blocks]
    state, loaded = module.state_dict(), set()
    names = zip(stored["variable_names"], stored["variable_shapes"], strict=True)
    for number, (variable, shape) in enumerate(names):
        array = weight(str(variable), [int(side) for side in str(shape).split("x")], seed)
        assert not check or array.flat[0] == stored["variable_first_values"][number]
        name = torch_name(str(variable), stages)
        assert name is not None, variable
        state[name.removeprefix(prefix)].copy_(torch_weight(str(variable), array))
        loaded.add(name.removeprefix(prefix))
    assert loaded == {name for name in state if not name.endswith("num_batches_tracked")}


def golden_input(stored: dict[str, Any]) -> Tensor:
    """Return the input of a golden file, (N, 3, H, W)."""
    array = image(stored["input_shape"], int(stored["seed"]))
    assert np.array_equal(array.ravel()[:8], stored["input_first_values"])
    return torch.from_numpy(array).permute(0, 3, 1, 2).contiguous()


def assert_golden(stored: dict[str, Any], name: str, found: Tensor) -> None:
    """Assert that a feature map (N, C, H, W) is the stored one; large ones are stored with every k-th channel."""
    array = found.detach().permute(0, 2, 3, 1).numpy()
    step = int(stored.get(f"{name}_channel_step", 1))
    _assert_close(array[..., ::step], stored[name], name)
    if f"{name}_channel_mean" in stored:
        _assert_close(array.mean((1, 2)), stored[f"{name}_channel_mean"], f"{name}, mean per channel")
        _assert_close(array.mean(3), stored[f"{name}_position_mean"], f"{name}, mean per position")


def _assert_close(found: Any, expected: Any, name: str) -> None:
    assert found.shape == expected.shape, name
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    assert difference <= TOLERANCE, f"{name} differs by {difference:.1e} of its largest value"
