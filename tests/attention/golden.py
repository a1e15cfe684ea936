"""Files in tests/golden: outputs, gradients and weights of the authors' published code for stored inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from caaseg.attention import ChannelizedAxialAttention

GOLDEN = Path(__file__).parents[1] / "golden"


def load(name: str) -> dict[str, Any]:
    """Return the arrays of a golden file by name."""
    with np.load(GOLDEN / name) as stored:
        return {key: stored[key] for key in stored.files}


def nchw(array: Any) -> Tensor:
    """(N, H, W, C) -> (N, C, H, W)."""
    return torch.from_numpy(array).permute(0, 3, 1, 2).contiguous()


def projections(block: ChannelizedAxialAttention) -> dict[str, nn.Module]:
    """Return the projections of a block by the prefix of their weights in the file."""
    return {"col_querykey": block.column_keys, "row_querykey": block.row_keys, "value": block.values}


def parameters(block: ChannelizedAxialAttention) -> dict[str, Tensor]:
    """Return every parameter by its name in the file."""
    named: dict[str, Tensor] = {}
    for prefix, module in projections(block).items():
        weights = dict(module.named_parameters())
        named |= {
            f"{prefix}_conv_kernel": weights["0.weight"],
            f"{prefix}_bn_gamma": weights["1.weight"],
            f"{prefix}_bn_beta": weights["1.bias"],
        }
    for prefix, gate in (("col_gate", block.column_gate), ("row_gate", block.row_gate)):
        if gate is not None:
            weights = dict(gate.named_parameters())
            for index in range(len(gate.hidden)):
                named[f"{prefix}_dense{index}_kernel"] = weights[f"hidden.{index}.weight"]
            named[f"{prefix}_dense_end_kernel"] = gate.last.weight
    return named


def torch_layout(array: Any) -> Tensor:
    """Convert weights from Keras' axis order (..., in, out) to torch's (out, in, ...)."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim]
    return torch.from_numpy(array.transpose(axes).copy())
