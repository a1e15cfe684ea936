"""Run in a fresh process by test_torchvision_compat: import torchvision after declaring its missing operators."""

import sys

import torch

from caaseg.torchvision_compat import declare_missing_operators


def flip() -> None:
    """Print the result of a torchvision transform; declare twice, the second time with existing operators."""
    declare_missing_operators()
    from torchvision.transforms.v2 import functional

    declare_missing_operators.cache_clear()
    declare_missing_operators()
    print(functional.horizontal_flip_image(torch.arange(3).reshape(1, 1, 3)).tolist())


def argument_name() -> None:
    """Print the name of the last argument of torchvision::nms."""
    declare_missing_operators()
    import torchvision  # noqa: F401

    print(torch.ops.torchvision.nms.default._schema.arguments[2].name)


if __name__ == "__main__":
    {"flip": flip, "argument_name": argument_name}[sys.argv[1]]()
