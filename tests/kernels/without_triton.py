"""Import the package and train an attention block for one step in a process that cannot import triton."""

import importlib
import pkgutil
import sys

import torch


def main() -> None:
    sys.modules["triton"] = None  # type: ignore[assignment]  # makes `import triton` fail

    import caaseg.kernels
    from caaseg.attention import ChannelizedAxialAttention

    assert not caaseg.kernels.HAS_TRITON
    for name in ("caaseg.attention", "caaseg.models", "caaseg.training"):
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__, f"{name}."):
            importlib.import_module(module.name)

    block, features = ChannelizedAxialAttention(6, key_channels=4, value_channels=8), torch.randn(1, 6, 4, 5)
    block(features).square().sum().backward()
    assert all(weight.grad is not None for weight in block.parameters())
    block.implementation = "fused"
    try:
        block(features)
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
