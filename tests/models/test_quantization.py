"""Quantization of ONNX models to INT8."""

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch

from caaseg.errors import CaasegError
from caaseg.models.onnx import OnnxModel
from caaseg.models.quantization import inputs_of, quantize_onnx
from tests.models.onnx_network import write_network
from tests.small_models import random_images


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a float32 model and its INT8 model."""
    directory = tmp_path_factory.mktemp("quantized")
    write_network(directory / "float32.onnx")
    images = (random_images(24, 32, seed=k) for k in range(4))
    inputs = inputs_of(OnnxModel(directory / "float32.onnx"), images)
    quantize_onnx(directory / "float32.onnx", directory / "int8.onnx", inputs)
    return directory


def test_int8_logits_are_close_to_float32_logits_at_any_size(directory: Path) -> None:
    float32, int8 = (OnnxModel(directory / f"{name}.onnx") for name in ("float32", "int8"))
    for size in ((1, 24, 32), (2, 17, 5), (1, 1, 1)):
        images = random_images(*size, seed=9).float()
        expected, found = float32(images), int8(images)
        assert not torch.equal(found, expected)
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_have_a_scale_per_channel_and_the_classifier_stays_float(directory: Path) -> None:
    assert {path.name for path in directory.iterdir()} == {"float32.onnx", "int8.onnx"}  # no temporary files
    before, after = (onnx.load(directory / f"{name}.onnx") for name in ("float32", "int8"))
    assert after.metadata_props == before.metadata_props
    weights = {tensor.name: tensor for tensor in after.graph.initializer}
    assert weights["entry_quantized"].data_type == onnx.TensorProto.INT8
    assert list(weights["entry_scale"].dims) == [8]
    assert weights["model.classifier.weight"].data_type == onnx.TensorProto.FLOAT
    quantized = {node.input[0] for node in after.graph.node if node.op_type == "QuantizeLinear"}
    assert quantized == {"images", "features"}


def test_calibration_inputs_are_those_of_prediction(tmp_path: Path) -> None:
    write_network(tmp_path / "m.onnx")
    model = OnnxModel(tmp_path / "m.onnx")
    model.config = model.config.replace(short_sides=(20, 20, 20), min_size=(32, 24))
    (inputs,) = inputs_of(model, iter([random_images(40, 80)]))
    assert inputs.shape == (1, 3, 32, 40)
    assert inputs.max() > 150  # values from 0 to 255


def test_an_unreadable_image_ends_the_calibration_with_its_message(tmp_path: Path) -> None:
    write_network(tmp_path / "m.onnx")

    def images() -> Iterator[torch.Tensor]:
        yield random_images(8, 8)
        raise CaasegError("b.png: cannot be read")

    with pytest.raises(CaasegError, match=r"b\.png: cannot be read"):
        quantize_onnx(tmp_path / "m.onnx", tmp_path / "q.onnx", inputs_of(OnnxModel(tmp_path / "m.onnx"), images()))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
