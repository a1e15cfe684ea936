"""Benchmark of multi-scale evaluation against a plain loop over images, scales and flips."""

import time
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from caaseg.data.sample import Batch, SegmentationDataset
from caaseg.data.transforms import normalize
from caaseg.evaluation.evaluate import evaluate
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models import Segmenter
from caaseg.models.predictor import Precision, Predictor, scaled
from caaseg.models.resize import resize


class EvaluationTimes(NamedTuple):
    """Times and scores of `evaluate` and of the plain loop."""

    images: int
    ours_s: float
    plain_s: float
    agreement: float  # share of pixels with the same prediction
    ours_mean_iou: float
    plain_mean_iou: float


class _First(Subset):  # type: ignore[type-arg]
    """The first images of a dataset, with its classes and palette."""

    def __init__(self, dataset: SegmentationDataset, number: int) -> None:
        super().__init__(dataset, range(number))  # type: ignore[arg-type]
        self.classes, self.palette = dataset.classes, dataset.palette


def measure_evaluation(
    model: Segmenter,
    dataset: SegmentationDataset,
    scales: Sequence[float],
    *,
    batch_size: int,
    images: int | None,
    precision: Precision,
    workers: int,
) -> EvaluationTimes:
    """Evaluate a model with flips at several scales, with `evaluate` and with a plain loop.

    Both are warmed up on the first images. The times include loading the images.

    Args:
        model: model on the device to measure.
        dataset: dataset whose images all have one size.
        scales: factors of the image size.
        batch_size: images per batch of `evaluate`.
        images: number of images, from the start of the dataset; None uses all.
        precision: computing precision of the network.
        workers: loader processes of `evaluate`; the plain loop loads in this process.
    """
    number = len(dataset) if images is None else min(images, len(dataset))
    predictor = Predictor(model, scales=scales, flip=True, precision=precision, batch_size=2 * batch_size)
    ours: list[Tensor] = []

    def collect(batch: Batch, predictions: Tensor) -> None:
        ours.extend(predictions.to(torch.uint8).cpu())

    evaluate(predictor, _First(dataset, min(batch_size, number)), batch_size=batch_size)
    _plain_loop(model, _First(dataset, 1), scales, precision)
    result = evaluate(predictor, _First(dataset, number), batch_size=batch_size, workers=workers, on_batch=collect)
    start = time.perf_counter()
    matrix, plain = _plain_loop(model, _First(dataset, number), scales, precision)
    plain_s = time.perf_counter() - start
    same = torch.stack([(a == b).double().mean() for a, b in zip(ours, plain, strict=True)])
    return EvaluationTimes(number, result.seconds, plain_s, float(same.mean()), result.mean_iou, matrix.mean_iou)


@torch.inference_mode()
def _plain_loop(
    model: Segmenter, dataset: SegmentationDataset, scales: Sequence[float], precision: Precision
) -> tuple[ConfusionMatrix, list[Tensor]]:
    device = model.classifier.weight.device
    matrix, predictions = ConfusionMatrix(len(dataset.classes), device), []
    model.eval()
    for index in range(len(dataset)):
        sample = dataset[index]
        image = normalize(sample.image[None].to(device), model.backbone.mean, model.backbone.std)
        size = image.shape[2:]
        total = torch.zeros((), device=device)
        for scale, flip in product(scales, (False, True)):
            view = resize(image, (scaled(size[0], scale), scaled(size[1], scale)))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(view.flip(-1) if flip else view).logits.float()
            total = total + resize(logits.flip(-1) if flip else logits, size)
        prediction = total.argmax(1)
        matrix.update(prediction, sample.label[None].to(device))
        predictions.append(prediction[0].to(torch.uint8).cpu())
    return matrix, predictions
