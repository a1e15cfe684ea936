"""Scoring at several scales, ours beside a plain loop over images, scales and mirrors."""

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


class Comparison(NamedTuple):
    """What both took, and on what share of the pixels they said the same."""

    images: int
    ours_s: float
    plain_s: float
    agreement: float
    ours_mean_iou: float
    plain_mean_iou: float


class _First(Subset):  # type: ignore[type-arg]
    """The first images of a dataset, with what scoring asks of it."""

    def __init__(self, dataset: SegmentationDataset, number: int) -> None:
        super().__init__(dataset, range(number))  # type: ignore[arg-type]
        self.classes, self.palette = dataset.classes, dataset.palette


def compare(
    model: Segmenter,
    dataset: SegmentationDataset,
    scales: Sequence[float],
    *,
    batch_size: int,
    images: int | None,
    precision: Precision,
    workers: int,
) -> Comparison:
    """Score a model both ways. Each is warmed up on the first images, and then timed with its reading of files.

    Args:
        model: where it is to run.
        dataset: what to score it on; its images are of one size.
        scales: factors of the images' size.
        batch_size: images that ours takes at once.
        images: how many, from the start; none takes all.
        precision: what the network computes in.
        workers: processes that read for ours; the plain loop reads for itself.
    """
    number = len(dataset) if images is None else min(images, len(dataset))
    predictor = Predictor(model, scales=scales, flip=True, precision=precision, batch_size=2 * batch_size)
    kept: list[Tensor] = []

    def keep(batch: Batch, predictions: Tensor) -> None:
        kept.extend(predictions.to(torch.uint8).cpu())

    warm = _First(dataset, min(batch_size, number))
    evaluate(predictor, warm, batch_size=batch_size)
    _plain(model, _First(dataset, 1), scales, precision)
    ours = evaluate(predictor, _First(dataset, number), batch_size=batch_size, workers=workers, on_batch=keep)
    started = time.perf_counter()
    matrix, predictions = _plain(model, _First(dataset, number), scales, precision)
    plain_s = time.perf_counter() - started
    same = [(a == b).double().mean() for a, b in zip(kept, predictions, strict=True)]
    return Comparison(number, ours.seconds, plain_s, float(torch.stack(same).mean()), ours.mean_iou, matrix.mean_iou)


@torch.inference_mode()
def _plain(
    model: Segmenter, dataset: SegmentationDataset, scales: Sequence[float], precision: Precision
) -> tuple[ConfusionMatrix, list[Tensor]]:
    """One image, one scale, one side after the other."""
    device = model.classifier.weight.device
    matrix, predictions = ConfusionMatrix(len(dataset.classes), device), []
    model.eval()
    for index in range(len(dataset)):
        sample = dataset[index]
        image = normalize(sample.image[None].to(device), model.backbone.mean, model.backbone.std)
        size = image.shape[2:]
        total = torch.zeros((), device=device)
        for scale, mirrored in product(scales, (False, True)):
            view = resize(image, (scaled(size[0], scale), scaled(size[1], scale)))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(view.flip(-1) if mirrored else view).logits.float()
            total = total + resize(logits.flip(-1) if mirrored else logits, size)
        prediction = total.argmax(1)
        matrix.update(prediction, sample.label[None].to(device))
        predictions.append(prediction[0].to(torch.uint8).cpu())
    return matrix, predictions
