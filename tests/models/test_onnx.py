"""Small ONNX models made by hand: their outputs must fit their metadata; their hash covers all of their files."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import caaseg
from caaseg.cli import main
from caaseg.data.transforms import GRAY
from caaseg.errors import CaasegError
from caaseg.models.inference import load_for_inference
from caaseg.models.onnx import OnnxModel, onnx_files, open_session
from tests.training.small import images_and_masks


def write_model(
    path: Path, weight: float = 0.5, declared: Any = "classes", operation: str = "Conv", **options: Any
) -> None:
    """Write a model with 3 logits, a 1 x 1 convolution of the image."""
    description = {"num_classes": 3, "classes": None, "palette": None, **options}
    weights = np.full((3, 3, 1, 1), weight, dtype=np.float32)
    sizes: list[str | int] = ["batch", 3, "height", "width"]
    graph = helper.make_graph(
        [helper.make_node(operation, ["images", "weights"][: 2 if operation == "Conv" else 1], ["logits"])],
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", declared, "rows", "columns"])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {"caaseg": json.dumps(description)})
    path.with_suffix(".weights").unlink(missing_ok=True)  # onnx appends to it
    external = {"save_as_external_data": True, "location": f"{path.stem}.weights", "size_threshold": 0}
    onnx.save(model, path, **external)  # type: ignore[arg-type]


def test_a_model_that_fits_its_metadata_runs(tmp_path: Path) -> None:
    write_model(tmp_path / "m.onnx", classes=["a", "b", "c"])
    model = OnnxModel(tmp_path / "m.onnx")
    assert (model.num_classes, model.classes, model.palette) == (3, ("a", "b", "c"), None)
    assert torch.equal(model(torch.ones(2, 3, 5, 7)), torch.full((2, 3, 5, 7), 1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 4}, r"does not fit its metadata \(logits have the shape \(1, 3, 64, 48\); expected \(1, 4, "),
        ({"num_classes": 2, "declared": 3}, r"does not fit its metadata \(logits have the shape \(1, 3, 64, 48\)"),
        ({"operation": "GlobalAveragePool"}, r"does not fit its metadata \(logits have the shape \(1, 3, 1, 1\)"),
        ({"weight": math.nan}, "returns logits that are NaN or infinite; export a model with finite weights"),
        ({"num_classes": math.inf}, r"without the metadata of caaseg export \(num_classes is inf"),
        ({"num_classes": "3"}, r"without the metadata of caaseg export \(num_classes is '3'"),
        ({"palette": [[0, 0, 300]] * 3}, r"without the metadata of caaseg export \(palette is "),
        (
            {"classes": json.loads("[" * 500 + "]" * 500)},
            r"without the metadata of caaseg export \((classes is|maximum recursion)",
        ),
    ],
)
def test_a_model_that_contradicts_its_metadata_is_refused_on_load(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "m.onnx", **options)
    with pytest.raises(CaasegError, match=rf"m\.onnx: .*{message}"):
        OnnxModel(tmp_path / "m.onnx")


def test_a_model_runs_on_the_gpu_with_the_number_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, providers: used.append(providers))
    for device in ("cpu", "cuda", "cuda:1"):
        open_session(tmp_path / "m.onnx", torch.device(device))
    gpus = [[("CUDAExecutionProvider", {"device_id": index})] for index in (0, 1)]
    assert used == [[*gpu, "CPUExecutionProvider"] for gpu in ([], *gpus)]


def test_onnxruntime_sends_no_telemetry_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    write_model(tmp_path / "m.onnx")
    (tmp_path / "m.weights").write_bytes(b"")
    with pytest.raises(CaasegError, match=r"m\.onnx: onnxruntime cannot read it"):
        OnnxModel(tmp_path / "m.onnx")
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    assert capfd.readouterr().err == ""


def test_the_hash_of_a_model_covers_its_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_model(path)
    assert onnx_files(path) == [path, tmp_path / "m.weights"]
    before, graph = load_for_inference(str(path)), path.read_bytes()
    write_model(path, weight=0.25)
    assert path.read_bytes() == graph
    assert load_for_inference(str(path)).digest != before.digest
    write_model(path)
    assert load_for_inference(str(path)).digest == before.digest
    assert before.source == str(path)


def test_images_are_resized_and_padded_as_the_metadata_say(tmp_path: Path) -> None:
    """As with the model that was exported: short sides of its training images, and the minimum size."""
    path = tmp_path / "m.onnx"
    write_model(path, short_sides=[20, 20, 20], min_size=[32, 24])
    model = caaseg.load_model(path)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.predict(torch.full((3, 40, 80), 200, dtype=torch.uint8))
    (images,) = seen
    assert images.shape == (1, 3, 32, 40)
    assert images[0, 0, :, 0].tolist() == [200.0] * 20 + [float(GRAY)] * 12


def test_evaluate_scores_an_exported_model(tmp_path: Path) -> None:
    images_and_masks(tmp_path / "data", number=2)
    (tmp_path / "data/classes.yaml").write_text("classes: [background, thing, other]\n")
    write_model(tmp_path / "m.onnx")  # equal logits: all pixels get the first class
    arguments = ["--dataset", "folder", "--root", str(tmp_path / "data"), "--split", "train+val", "--workers", "0"]
    assert main(["evaluate", str(tmp_path / "m.onnx"), *arguments, "--json", str(tmp_path / "scores.json")]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    things = 2 * 20 * 25
    assert scores["confusion"] == [[48 * 64 + 49 * 64 - things, 0, 0], [things, 0, 0], [0, 0, 0]]
