"""Static quantization of exported models to INT8 with onnxruntime, after calibration on images.

Weights have one scale per output channel, activations one scale and zero point per tensor, from the ranges seen in the
calibration images. The file stores quantize and dequantize operators (QDQ) around the float operators; onnxruntime
fuses them into integer operators when it loads the file.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from caaseg.models.onnx import INPUT, OnnxModel
from caaseg.models.predictor import Predictor

QUANTIZED = ("Conv", "Relu", "Add", "MaxPool")
"""Quantized operators. The others (matrix products and softmax of the attention, gates, resizing) take little time."""
FLOAT_WEIGHTS = ("model.classifier.weight",)
"""Weights of convolutions that stay float32: with 256 different values, logits of several classes would be equal."""


def quantize_onnx(source: Path, target: Path, inputs: Iterator[Tensor]) -> None:
    """Write the INT8 model of a float32 model, with the same metadata.

    Args:
        source: a file that `export_model` wrote.
        target: the file to write.
        inputs: batches of images as the model gets them, (N, 3, H, W).
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with TemporaryDirectory() as directory:  # onnxruntime writes further files next to the files it reads
        prepared, quantized = Path(directory, "prepared.onnx"), Path(directory, "quantized.onnx")
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        convolutions = [node for node in onnx.load(prepared).graph.node if node.op_type == "Conv"]
        quantize_static(
            prepared,
            quantized,
            _Reader(inputs),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=list(QUANTIZED),
            nodes_to_exclude=[node.name for node in convolutions if node.input[1] in FLOAT_WEIGHTS],
        )
        described = {entry.key: entry.value for entry in onnx.load(source).metadata_props}
        write_metadata(quantized, target, described)


def write_metadata(source: Path, target: Path, described: dict[str, str]) -> None:
    """Write a copy of an ONNX file with other metadata."""
    import onnx

    model = onnx.load(source)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, described)
    onnx.save(model, target)


def inputs_of(model: OnnxModel, images: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the inputs of a model when it predicts images: resized, padded, in windows if they are large.

    Args:
        model: the model, which predicts the images.
        images: uint8, (3, H, W) each.
    """
    seen: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        predictor = Predictor(model)
        for image in images:
            predictor(image)
            yield from seen
            seen.clear()
    finally:
        hook.remove()


class _Reader:
    """Calibration data as onnxruntime reads them."""

    def __init__(self, inputs: Iterator[Tensor]) -> None:
        self.inputs = inputs

    def get_next(self) -> dict[str, Any] | None:
        images = next(self.inputs, None)
        return None if images is None else {INPUT: images.float().contiguous().numpy()}
