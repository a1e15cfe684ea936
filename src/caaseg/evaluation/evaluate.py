"""A model scored on a dataset as the field does it: one confusion matrix over all labelled pixels."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caaseg.data.loader import EvaluationLoader
from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.evaluation.metrics import BoundaryCounts, ConfusionMatrix
from caaseg.models.predictor import Predictor


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What came out. Scores are from 0 to 1, exact; NaN where a class, or a whole split, has nothing to be scored by.

    A class that neither labels nor predictions have has no IoU, one without labels no accuracy; means leave them out.
    """

    classes: tuple[str, ...]
    confusion: Tensor
    """Labelled pixels by true and predicted class, (K, K)."""
    mean_iou: float
    pixel_accuracy: float
    mean_accuracy: float
    iou: tuple[float, ...]
    """Of each class."""
    accuracy: tuple[float, ...]
    """Of each class: the share of its pixels that were found."""
    mean_boundary_iou: float | None
    boundary_iou: tuple[float, ...] | None
    """Of each class; None unless asked for."""
    images: int
    """How many were scored, each once, in all processes together."""
    seconds: float


def evaluate(
    model: nn.Module | Predictor,
    dataset: SegmentationDataset,
    *,
    boundary: bool = False,
    batch_size: int = 1,
    workers: int = 0,
    seen: Callable[[Batch, Tensor], None] | None = None,
) -> Evaluation:
    """Score a model on every image of a dataset.

    Images come and go one by one; counts of pixels are all that is kept. Where torch.distributed is running, each
    process takes its share of the images and all return the whole result.

    Args:
        model: scored on whole images at their own scale; a Predictor says otherwise.
        dataset: what to score it on.
        boundary: boundary IoU too.
        batch_size: images read at once; above 1 they must be of one size.
        workers: processes that read beside this one, while the model computes; 0 reads in this one.
        seen: told of each batch of this process with its predicted class ids, (N, H, W).
    """
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    if len(dataset) == 0:
        raise ValueError("the dataset has no images to score; check its folder and its split")
    several = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    pin = predictor.device.type == "cuda"
    loader = EvaluationLoader(dataset, batch_size=batch_size, workers=workers, rank=rank, ranks=ranks, pin_memory=pin)
    num_classes = len(dataset.classes)
    matrix = ConfusionMatrix(num_classes, predictor.device)
    boundaries = BoundaryCounts(num_classes, predictor.device) if boundary else None
    started = time.perf_counter()
    for batch in loader:
        scores = _scores(predictor, batch)  # (N, K, H, W)
        check_classes(scores.shape[1], dataset)
        predictions = scores.argmax(1)  # (N, H, W)
        labels = batch.labels.to(predictor.device, non_blocking=True)
        matrix.update(predictions, labels)
        if boundaries is not None:
            boundaries.update(predictions, labels)
        if seen is not None:
            seen(batch, predictions)
    matrix.reduce()
    if boundaries is not None:
        boundaries.reduce()
    return Evaluation(
        classes=tuple(dataset.classes),
        confusion=matrix.counts.cpu(),
        mean_iou=matrix.mean_iou,
        pixel_accuracy=matrix.pixel_accuracy,
        mean_accuracy=matrix.mean_accuracy,
        iou=tuple(matrix.iou.tolist()),
        accuracy=tuple(matrix.accuracy.tolist()),
        mean_boundary_iou=None if boundaries is None else boundaries.mean_iou,
        boundary_iou=None if boundaries is None else tuple(boundaries.iou.tolist()),
        images=len(dataset),
        seconds=time.perf_counter() - started,
    )


def _scores(predictor: Predictor, batch: Batch) -> Tensor:
    try:
        return predictor.scores(batch.images)
    except torch.OutOfMemoryError as error:
        height, width = batch.images.shape[2:]
        raise ValueError(
            f"{batch.names[0]}: {len(batch.names)} x {height} x {width} at scale {max(predictor.scales):g} is more "
            f"than the memory of {predictor.device} holds; take smaller windows, fewer images at once, or bf16"
        ) from error


def check_classes(num_classes: int, dataset: SegmentationDataset) -> None:
    """Refuse a model of another number of classes than the data's."""
    if num_classes != len(dataset.classes):
        names = ", ".join([*dataset.classes[:3], *(["..."] if len(dataset.classes) > 3 else [])])
        raise ValueError(
            f"the model tells {num_classes} classes apart, but the data have {len(dataset.classes)} ({names}); "
            "evaluate it on the dataset it was trained on, or train one on this dataset"
        )


class Place(NamedTuple):
    """Where a process stands among those that evaluate together."""

    device: torch.device
    rank: int
    ranks: int


@contextmanager
def processes(device: torch.device, *, patience: timedelta | None = None) -> Iterator[Place]:
    """Join the processes that torchrun started, if it did, each on a GPU of its own where `device` is one.

    Args:
        device: what kind to use.
        patience: how long one waits for another that has more to do; None takes torch's minutes.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield Place(device, 0, 1)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    try:
        yield Place(device, dist.get_rank(), ranks)
    finally:
        dist.destroy_process_group()
