"""The scoring loop: one confusion matrix over all labeled pixels of a dataset."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caaseg.data.loader import EvaluationLoader
from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.errors import CaasegError
from caaseg.evaluation.metrics import BoundaryIoU, ConfusionMatrix, Metric, MetricFactory
from caaseg.models.predictor import Predictor
from caaseg.process_group import is_distributed


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Scores of a model on a dataset, from 0 to 1, not rounded.

    A class in neither labels nor predictions has no IoU and a class without labels has no accuracy: these are NaN, and
    means skip them.
    """

    classes: tuple[str, ...]
    confusion: Tensor
    """Labeled pixels by true and predicted class, (K, K)."""
    mean_iou: float
    pixel_accuracy: float
    mean_accuracy: float
    iou: tuple[float, ...]
    """IoU per class."""
    accuracy: tuple[float, ...]
    """Share of each class's pixels that are predicted correctly."""
    mean_boundary_iou: float | None
    boundary_iou: tuple[float, ...] | None
    """Boundary IoU per class; None if not requested."""
    images: int
    """Number of images, each scored once, over all processes."""
    seconds: float
    further: dict[str, float] = field(default_factory=dict)
    """Scores of further metrics, by name."""

    @property
    def scores(self) -> dict[str, float]:
        """All scores over the whole dataset, by name."""
        named = {name: getattr(self, name) for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")}
        if self.mean_boundary_iou is not None:
            named["mean_boundary_iou"] = self.mean_boundary_iou
        return {**named, **self.further}


def evaluate(
    model: nn.Module | Predictor,
    dataset: SegmentationDataset,
    *,
    boundary: bool = False,
    metrics: Sequence[MetricFactory] = (),
    batch_size: int = 1,
    workers: int = 0,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> Evaluation:
    """Score a model on every image of a dataset.

    Images are read, scored and released one batch at a time. If torch.distributed is initialized, each process scores
    its share of the images and all return the whole result.

    Args:
        model: a model, or a Predictor to change the settings of prediction.
        dataset: images and labels to score.
        boundary: also compute boundary IoU.
        metrics: further metrics, each a class or function called with the number of classes and the device.
        batch_size: images per batch; above 1 all images must have the same size.
        workers: number of processes that read images; 0 reads in this process.
        on_batch: called with each batch of this process and its predicted class ids, (N, H, W).

    Returns:
        The scores over the whole dataset, and the confusion matrix (K, K).
    """
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    if len(dataset) == 0:
        raise CaasegError("the dataset has no images to score; check its directory and its split")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    num_classes, device = len(dataset.classes), predictor.device
    pin = device.type == "cuda"
    loader = EvaluationLoader(dataset, batch_size=batch_size, workers=workers, rank=rank, ranks=ranks, pin_memory=pin)
    matrix = ConfusionMatrix(num_classes, device)
    boundaries = BoundaryIoU(num_classes, device) if boundary else None
    others = [factory(num_classes, device) for factory in metrics]
    all_metrics: list[Metric] = [matrix, *([] if boundaries is None else [boundaries]), *others]
    start = time.perf_counter()
    for batch in loader:
        predictions = _predict(predictor, batch)  # (N, H, W)
        check_classes(predictor.num_outputs or num_classes, dataset)
        labels = batch.labels.to(device, non_blocking=True)
        for metric in all_metrics:
            metric.update(predictions, labels)
        if on_batch is not None:
            on_batch(batch, predictions)
    for metric in all_metrics:
        metric.reduce()
    return Evaluation(
        classes=tuple(dataset.classes),
        confusion=matrix.counts.cpu(),
        iou=tuple(matrix.iou.tolist()),
        accuracy=tuple(matrix.accuracy.tolist()),
        mean_boundary_iou=None if boundaries is None else boundaries.mean_iou,
        boundary_iou=None if boundaries is None else tuple(boundaries.iou.tolist()),
        images=len(dataset),
        seconds=time.perf_counter() - start,
        further={name: score for metric in others for name, score in metric.compute().items()},
        **matrix.compute(),
    )


def _predict(predictor: Predictor, batch: Batch) -> Tensor:
    try:
        return predictor.labels(batch.images)
    except torch.OutOfMemoryError as error:
        height, width = batch.images.shape[2:]
        raise CaasegError(
            f"{batch.names[0]}: {len(batch.names)} x {height} x {width} at scale {max(predictor.scales):g} does not "
            f"fit in the memory of {predictor.device}; use smaller windows, a smaller batch size, or bf16"
        ) from error


def check_classes(num_classes: int, dataset: SegmentationDataset) -> None:
    """Raise CaasegError if the numbers of classes of a model and a dataset differ."""
    if num_classes != len(dataset.classes):
        names = ", ".join([*dataset.classes[:3], *(["..."] if len(dataset.classes) > 3 else [])])
        raise CaasegError(
            f"the model has {num_classes} classes, but the dataset has {len(dataset.classes)} ({names}); "
            "evaluate it on the dataset it was trained on, or train a model on this dataset"
        )
