"""A tiny model, an unfinished run and a small dataset, made once per process and copied into cases."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from caaseg.recipes import load_recipe, recipe_text
from caaseg.training.run import train
from tests.small_models import small_model

T = TypeVar("T")

CLASSES = ("background", "cat", "dog")
SIZE = 16
TINY_TRAINING = (
    *("--model.backbone", "test_resnet", "--model.channels", "8", "--model.key_channels", "2"),
    *("--model.gate_width", "4", "--model.output_stride", "16", "--data.crop", "16", "16", "--data.workers", "0"),
    *("--batch_size", "2", "--steps", "2", "--validate_every", "2", "--checkpoint_every", "1"),
    *("--optimizer.warmup_steps", "0"),
)
RECIPE = "folder/caa_resnet18"

HOSTILE_TEXTS = (
    *("", " ", "-1", "0", "1e999", "nan", "-inf", "null", "true", "1,2", "0x10", "[", "{}", "=", "--", "-", "*", "~"),
    *(
        "[/]run",
        "[red]x",
        "\x1b[31mx",
        "a\tb",
        "ä",
        "💣",
        "%s",
        "{0}",
        "$(x)",
        "../x",
        "/dev/null/x",
        ".",
        "..",
        "x" * 5000,
    ),
    *("9" * 30, "9" * 5000, "1" + "0" * 400, "2024-13-99", "1:2:3", "none", "auto", "cuda:99"),
)
HOSTILE_VALUES: tuple[Any, ...] = (
    *HOSTILE_TEXTS,
    *(None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *([], {}, [None], [1, 2, 3], {"a": 1}, [[[[[]]]]], "\ud800", list(range(1000))),
)


@cache
def shared_directory() -> Path:
    """Return a directory that is deleted when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="hostile-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def shared_data() -> Path:
    """Return the directory of a dataset."""
    write_data(shared_directory() / "data")
    return shared_directory() / "data"


@cache
def shared_model() -> Path:
    """Return the directory of a model."""
    model = small_model(num_classes=len(CLASSES), classes=CLASSES, channels=8, key_channels=2, gate_width=4)
    model.save_pretrained(shared_directory() / "model")
    return shared_directory() / "model"


@cache
def shared_onnx() -> Path:
    """Return an ONNX model, a 1 x 1 convolution of the image. It loads much faster than the other model."""
    sizes: list[str | int] = ["batch", len(CLASSES), "height", "width"]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["images", "weights"], ["logits"])],
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, sizes)],
        [numpy_helper.from_array(np.eye(len(CLASSES), dtype=np.float32)[:, :, None, None], "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(
        model, {"caaseg": json.dumps({"num_classes": len(CLASSES), "classes": CLASSES, "palette": None})}
    )
    path = shared_directory() / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@cache
def shared_run() -> Path:
    """Return the directory of a run with a checkpoint after the first of its two steps."""
    run = shared_directory() / "run"
    recipe = load_recipe(RECIPE, [*TINY_TRAINING, "--data.root", "data"])
    at_data = recipe.replace(data=recipe.data.replace(root=str(shared_data())))
    train(at_data, run, device="cpu")
    (run / "recipe.yaml").write_text(recipe_text(recipe))
    (run / "checkpoints" / "step-00000002.pt").unlink()
    for name in ("model", "best", "tensorboard"):
        shutil.rmtree(run / name, ignore_errors=True)
    return run


def train_arguments(data: Path, out: Path) -> list[str]:
    return ["train", RECIPE, "--out", str(out), "--data.root", str(data), "--device", "cpu", *TINY_TRAINING]


def write_data(root: Path, number: int = 4) -> None:
    """Write a directory of images and masks."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for k in range(number):
        mask = rng.integers(0, len(CLASSES), (SIZE, SIZE), dtype=np.uint8)
        Image.fromarray(np.stack([mask * 80] * 3, 2)).save(root / "images" / f"{k}.png")
        Image.fromarray(mask).save(root / "masks" / f"{k}.png")
    (root / "classes.yaml").write_text(f"classes: [{', '.join(CLASSES)}]\n")


def write_image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(path)
    return path


def choice(rng: Generator, values: Sequence[T]) -> T:
    """Return one of some values; numpy's own function would convert them."""
    return values[int(rng.integers(len(values)))]
