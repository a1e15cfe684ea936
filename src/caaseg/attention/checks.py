"""Input checks of the attention functions."""

from torch import Tensor


def check_maps(**maps: Tensor) -> None:
    """Raise ValueError unless all maps are (N, channels, H, W) and agree in batch, height, width and device."""
    first, reference = next(iter(maps.items()))
    for name, tensor in maps.items():
        shape = tuple(tensor.shape)
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions, shape {shape}; expected 4: (N, channels, H, W); "
                "add a batch dimension with unsqueeze(0) if there is one image"
            )
        for axis, size in zip(("N", "channels", "H", "W"), shape, strict=True):
            if size == 0:
                raise ValueError(f"{name} has an empty axis {axis}, shape {shape}; every axis needs at least 1 entry")
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; expected a floating-point dtype; convert it with .float()"
            )
        if (shape[0], *shape[2:]) != (reference.shape[0], *reference.shape[2:]):
            raise ValueError(
                f"{name} has shape {shape}, but {first} has shape {tuple(reference.shape)}; "
                "batch, height and width (axes 0, 2 and 3) must agree"
            )
        if tensor.device != reference.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but {first} is on {reference.device}; move both to one device"
            )


def check_same_channels(**maps: Tensor) -> None:
    """Raise ValueError unless all maps have the same number of channels."""
    first, reference = next(iter(maps.items()))
    for name, tensor in maps.items():
        if tensor.shape[1] != reference.shape[1]:
            raise ValueError(
                f"{name} has {tensor.shape[1]} channels, but {first} has {reference.shape[1]}; expected the same number"
            )


def check_gate(gate: Tensor, pooled: Tensor, name: str) -> None:
    """Raise ValueError unless a gate returned a tensor of the shape of the pooled features."""
    if not isinstance(gate, Tensor):
        raise ValueError(f"{name} returned {type(gate).__name__}; expected a tensor (N, positions, channels)")
    if gate.shape != pooled.shape:
        raise ValueError(
            f"{name} returned shape {tuple(gate.shape)} for pooled features of shape {tuple(pooled.shape)}; "
            "expected the same shape, (N, positions, channels)"
        )
