"""Weights and inputs of the golden files as functions of name, shape and seed."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GAINS = {
    "conv3_bn/gamma": 0.25,
    "project_bn/gamma": 0.6,
    "top_bn/gamma": 6.0,
    "querykey_convbnrelu/bn/gamma": 0.15,
    "querykey_convbnrelu/bn/beta": 0.15,
    "dense_end/kernel": 4.0,
    "seg_head/end_convbnrelu/bn/gamma": 4.0,
    "logits_conv/kernel": 0.5,
}
"""Ends of names and their factors, which keep activations moderate."""


def weight(name: str, shape: Sequence[int], seed: int) -> NDArray[np.float32]:
    """Return a variable in TensorFlow's axis order: kernels are HWIO, HWC1 or [in, out]."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    kind = name.rsplit("/", 1)[-1]
    values: Any
    if kind in ("kernel", "depthwise_kernel"):
        fan_in = np.prod(shape[:2] if kind == "depthwise_kernel" else shape[:-1])
        values = random.standard_normal(shape) * np.sqrt(2.0 / fan_in)
    elif kind == "gamma":  # one in ten is negative
        values = random.uniform(0.5, 1.5, shape)
        values *= np.where(random.random(shape) < 0.1, -1.0, 1.0)
    elif kind == "moving_variance":
        values = random.uniform(0.5, 1.5, shape)
    elif kind in ("beta", "moving_mean", "bias"):
        values = random.standard_normal(shape) * 0.2
    else:
        raise ValueError(name)
    for end, gain in GAINS.items():
        values = values * (gain if name.endswith(end) else 1.0)
    return np.asarray(values, dtype=np.float32)


def image(shape: Sequence[int], seed: int) -> NDArray[np.float32]:
    """Return blocks of color plus noise, (N, H, W, C)."""
    random, (n, h, w, c) = np.random.default_rng(seed), shape
    blocks = random.uniform(-1, 1, (n, h // 16 + 1, w // 16 + 1, c)).repeat(16, 1).repeat(16, 2)
    values: Any = blocks[:, :h, :w] + 0.2 * random.standard_normal(shape)
    return np.asarray(values, dtype=np.float32)
