"""One of several processes that find the bases of EMANet on their part of a batch."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from caaseg.models.heads.emanet import ExpectationMaximizationAttention


def block() -> ExpectationMaximizationAttention:
    """Return an attention with 3 bases of 5 channels, the same in every process."""
    torch.manual_seed(0)
    return ExpectationMaximizationAttention(5, num_bases=3, iterations=2).double()


def batch() -> Tensor:
    """Return the pixels of 4 images, (4, 12, 5)."""
    return 2 * torch.randn(4, 12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def write_bases(directory: Path) -> None:
    """Write the bases after one step of this process to rankR.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    attention = block().train()
    attention.reconstruct(batch()[rank * 4 // ranks : (rank + 1) * 4 // ranks])
    torch.save(attention.bases, directory / f"rank{rank}.pt")
    dist.destroy_process_group()
