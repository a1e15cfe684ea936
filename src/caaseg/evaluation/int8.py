"""Export to INT8: calibrate and quantize a model, and compare it with its float32 export."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch import Tensor

from caaseg.data.calibration import Calibration, Read
from caaseg.data.sample import SegmentationDataset
from caaseg.evaluation.evaluate import check_classes
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.files import atomic_write
from caaseg.models.export import METADATA, Check, check_target, export_model
from caaseg.models.onnx import OnnxModel
from caaseg.models.predictor import Predictor
from caaseg.models.quantization import inputs_of, quantize_onnx, write_metadata
from caaseg.models.segmenter import Segmenter

Progress = Callable[[str, int, int | None], None]
"""Called with the name of a step, the number of finished images, and their total number."""


class Int8Scores(NamedTuple):
    """Comparison of an INT8 model with its float32 export, from 0 to 1, not rounded."""

    calibration_images: int
    images: int  # on which both models were compared
    pixel_agreement: float  # share of the pixels for which both predict the same class
    float32_mean_iou: float | None  # this and the next: None without labels
    int8_mean_iou: float | None


def export_int8(
    model: Segmenter,
    path: Path,
    calibration: Calibration,
    *,
    dataset: SegmentationDataset | None = None,
    progress: Progress = lambda step, done, total: None,
) -> tuple[Check, Int8Scores]:
    """Export a model to ONNX, quantize it to INT8, and compare the two. The file is written as a whole at the end.

    Args:
        model: the model.
        path: output file, with the suffix .onnx; its metadata contain the scores.
        calibration: images for calibration, and for the comparison without labels.
        dataset: labeled images for the comparison, if there are any.
        progress: called after each image.

    Returns:
        The comparison of the float32 export with the model, and of INT8 with float32.
    """
    check_target(path)
    if dataset is not None:
        check_classes(model.config.num_classes, dataset)
    with TemporaryDirectory() as directory:
        plain, quantized = Path(directory, "float32.onnx"), Path(directory, "int8.onnx")
        check = export_model(model, plain)
        float32 = OnnxModel(plain)
        quantize_onnx(plain, quantized, inputs_of(float32, _read(calibration.images, progress)))
        scores = compare_int8(float32, OnnxModel(quantized), calibration, dataset, progress)
        described = {**_description(quantized), "int8": scores._asdict()}
        with atomic_write(path) as file:
            write_metadata(quantized, file, {METADATA: json.dumps(described)})
    return check, scores


def compare_int8(
    float32: OnnxModel,
    int8: OnnxModel,
    calibration: Calibration,
    dataset: SegmentationDataset | None,
    progress: Progress = lambda step, done, total: None,
) -> Int8Scores:
    """Compare the predictions of two models with each other and, if there are any, with labels."""
    predictors = Predictor(float32), Predictor(int8)
    matrices = ConfusionMatrix(float32.num_classes), ConfusionMatrix(int8.num_classes)
    total = len(calibration.others) if dataset is None else len(dataset)
    same = pixels = 0
    for k in range(total):
        image, label = (calibration.others[k](), None) if dataset is None else dataset[k][:2]
        before, after = (predictor.labels(image[None])[0] for predictor in predictors)  # (H, W)
        same += int((before == after).sum())
        pixels += before.numel()
        if label is not None:
            for matrix, prediction in zip(matrices, (before, after), strict=True):
                matrix.update(prediction, label)
        progress("comparing", k + 1, total)
    is_labeled = bool(matrices[0].counts.any())
    mean_ious = [matrix.mean_iou if is_labeled else None for matrix in matrices]
    return Int8Scores(len(calibration.images), total, same / pixels, *mean_ious)


def _read(images: list[Read], progress: Progress) -> Iterator[Tensor]:
    for done, read in enumerate(images):
        progress("calibrating", done, len(images))
        yield read()


def _description(path: Path) -> dict[str, object]:
    import onnx

    entries = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    description: dict[str, object] = json.loads(entries[METADATA])
    return description
