"""Channel gates: one weight in (0, 1) per channel, from pooled features."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from caaseg.attention.checks import check_gate

Gate = Callable[[Tensor], Tensor]
"""Channel weights from pooled features, (N, L, C) -> (N, L, C). Positions must be independent: the grouped
implementations pass a few positions at a time."""

Activation = Literal["leaky_relu", "relu"]
"""Activation of the hidden layers of a gate."""

SLOPES: dict[str, float] = {"leaky_relu": 0.2, "relu": 0.0}  # slope of each activation below zero


class ChannelGate(nn.Module):
    """The paper's gate: hidden layers of equal width, a linear layer back to C channels, a sigmoid; no biases.

    Table 1 of the paper varies layers (1, 3, 5, 7) and width (64, 128, 256); 5 layers of width 128 scored best.

    Args:
        channels: channels C of the pooled features, (N, L, C), and of the gate.
        layers: number of hidden layers.
        width: units per hidden layer.
        activation: "leaky_relu" (slope 0.2) or "relu".
    """

    def __init__(
        self, channels: int, *, layers: int = 5, width: int = 128, activation: Activation = "leaky_relu"
    ) -> None:
        super().__init__()
        for name, size in (("channels", channels), ("layers", layers), ("width", width)):
            if size < 1:
                raise ValueError(f"{name} is {size}; a gate needs at least 1")
        if activation not in SLOPES:
            raise ValueError(f"activation is {activation!r}; expected one of {', '.join(SLOPES)}")
        self.hidden = nn.ModuleList(
            nn.Linear(channels if layer == 0 else width, width, bias=False) for layer in range(layers)
        )
        self.slope = SLOPES[activation]
        self.last = nn.Linear(width, channels, bias=False)
        for layer in (*self.hidden, self.last):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, pooled: Tensor) -> Tensor:
        """(N, L, C) -> (N, L, C), between 0 and 1."""
        for layer in self.hidden:
            pooled = leaky_relu(layer(pooled), self.slope)  # (N, L, width)
        logits: Tensor = self.last(pooled)  # (N, L, C)
        return logits.sigmoid()


def apply_gate(gate: Gate, pooled: Tensor, name: str) -> Tensor:
    """Apply a gate to pooled features, check the shape of the result and convert it to their dtype."""
    if not callable(gate):
        raise ValueError(f"{name} is {gate!r}; expected a callable (N, L, C) -> (N, L, C), or None for no gate")
    weights = gate(pooled)
    check_gate(weights, pooled, name)
    return weights.to(pooled.dtype)
