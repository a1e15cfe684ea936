"""A small ONNX network made by hand, with the metadata of `caaseg export`."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NUM_CLASSES = 3


def write_network(path: Path, seed: int = 0) -> None:
    """Write a 3 x 3 convolution with ReLU, a softmax over channels, and a classifier."""
    rng = np.random.default_rng(seed)
    weights = {
        "entry": rng.standard_normal((8, 3, 3, 3)) / 255,
        "model.classifier.weight": rng.standard_normal((NUM_CLASSES, 8, 1, 1)),
    }
    sizes: list[str | int] = ["batch", 3, "height", "width"]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["images", "entry"], ["convolved"], name="entry", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["convolved"], ["features"], name="relu"),
            helper.make_node("Softmax", ["features"], ["attended"], name="softmax", axis=1),
            helper.make_node("Conv", ["attended", "model.classifier.weight"], ["logits"], name="classifier"),
        ],
        "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", NUM_CLASSES, "height", "width"])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {"caaseg": json.dumps({"num_classes": 3, "classes": None, "palette": None})})
    onnx.save(model, path)
