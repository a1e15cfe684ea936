"""One of several processes that compute the losses of class-aware regularization on their part of a batch."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from caaseg.training.car import car_losses

NUM_CLASSES = 5


def batch() -> tuple[Tensor, Tensor]:
    """Return float64 features (4, 8, 5, 6) and labels (4, 9, 11) with ignored pixels and an absent class."""
    generator = torch.Generator().manual_seed(0)
    features = 2 * torch.randn(4, 8, 5, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, NUM_CLASSES - 1, (4, 9, 11), generator=generator).byte()
    labels[0, :4] = labels[3] = 255  # an image without labels, and ranks with different numbers of labeled pixels
    labels[2:][labels[2:] == 0] = 1  # a class that only the first images have
    return features, labels


def gradients(features: Tensor, labels: Tensor, ranks: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each loss and the gradient of the features; every process adds its share of the loss."""
    results = {}
    for name in ("intra", "c2c", "c2p"):
        leaf = features.clone().requires_grad_()
        loss: Tensor = getattr(car_losses(leaf, labels, NUM_CLASSES), name)
        (gradient,) = torch.autograd.grad(loss / ranks, leaf)
        results[name] = loss.detach(), gradient
    return results


def write_gradients(directory: Path) -> None:
    """Write the losses of this process and the gradients of its features to rankR.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    features, labels = batch()
    part = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    torch.save(gradients(features[part], labels[part], ranks), directory / f"rank{rank}.pt")
    dist.destroy_process_group()
