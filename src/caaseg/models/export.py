"""A model as a file that other software runs: ONNX, or a program of torch.export.

Both take RGB values from 0 to 255, as decoders give them, and normalize inside: nobody downstream has to know how. They
give logits at the images' size. Batch, height and width are open.
"""

import copy
import json
import math
import operator
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import caaseg
from caaseg.data.datasets.scenes import Scenes
from caaseg.files import atomic_write
from caaseg.models.onnx import INPUT, INSTALL, OUTPUT, OnnxModel
from caaseg.models.segmenter import Segmenter

Format = Literal["onnx", "torch"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
METADATA = "caaseg"
"""Where the description is: a metadata property of an ONNX file, an extra file caaseg.json of a .pt2."""
TOLERANCE = 1e-3
"""Largest difference of logits that is taken for rounding."""
ROUNDINGS = 10
"""Or so many times what float32 takes from the model itself: some networks multiply the smallest error."""
CHECKS = 10
LARGEST_SIDE = 200
"""Of the images that it is checked with."""


class Deployed(nn.Module):
    """The network as it is handed on: values from 0 to 255 in, logits out."""

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        # Numbers are the same in every implementation, but this one has no sizes written into it.
        self.model = Segmenter(model.config.replace(implementation="factorised"))
        self.model.load_state_dict(model.state_dict())
        for name, levels in (("mean", model.backbone.mean), ("std", model.backbone.std)):
            self.register_buffer(name, torch.tensor(levels).view(3, 1, 1) * 255)
        self.mean: Tensor
        self.std: Tensor
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images - self.mean) / self.std).logits
        return logits


class Check(NamedTuple):
    """How close the file came to the model."""

    sizes: tuple[tuple[int, int, int], ...]  # batch, height, width
    difference: float  # largest, of all logits at all sizes
    rounding: float  # how far the model itself is from what it says in float64
    largest_logit: float


def export_model(model: Segmenter, path: Path, kind: Format = "onnx") -> Check:
    """Write a model for other software; the file is there only if what it says agrees with the model.

    Args:
        model: what to export.
        path: the file, which ends in .onnx or .pt2.
        kind: onnx, or torch for a program of torch.export.
    """
    if path.suffix != ENDINGS[kind]:
        raise ValueError(f"{path}: expected a name that ends in {ENDINGS[kind]}, for the format {kind}")
    if kind == "onnx":
        _check_exporter()
    deployed = Deployed(model)
    smallest = model.config.output_stride + 1  # two features each way, below which torch.export tells sizes apart
    with atomic_write(path) as aside:
        with warnings.catch_warnings(action="ignore"):  # of torch's exporter, about its own parts
            example = torch.rand(2, 3, 4 * smallest, 3 * smallest) * 255
            open_sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
            program = torch.export.export(deployed, (example,), dynamic_shapes=(open_sizes,), strict=False)
            description = json.dumps(_description(model, 1 if kind == "onnx" else smallest))
            run = {"onnx": _write_onnx, "torch": _write_torch}[kind](program, description, aside)
        return _checked(deployed, run, 1 if kind == "onnx" else smallest, path)


def _description(model: Segmenter, smallest: int) -> dict[str, Any]:
    config = model.config
    return {
        "caaseg": caaseg.__version__,
        "input": "float32 (batch, 3, height, width), RGB, values from 0 to 255, upright; normalized inside",
        "output": "float32 (batch, classes, height, width), logits; the class of a pixel is the largest",
        "smallest_side": smallest,
        "num_classes": config.num_classes,
        "classes": config.classes,
        "palette": config.palette,
        "mean": model.backbone.mean,
        "std": model.backbone.std,
        "head": config.head,
        "backbone": config.backbone,
        "output_stride": config.output_stride,
    }


def _check_exporter() -> None:
    """Say what is missing before any work."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"exporting to ONNX needs {name}, which is not here; {INSTALL}") from error


def _write_onnx(program: ExportedProgram, description: str, path: Path) -> Callable[[Tensor], Tensor]:
    exported = torch.onnx.export(program, dynamo=True, verbose=False, input_names=[INPUT], output_names=[OUTPUT])
    assert exported is not None
    exported.model.metadata_props[METADATA] = description
    for value in (*exported.model.graph.inputs, *exported.model.graph.outputs):
        assert value.shape is not None
        for axis, name in ((0, "batch"), (2, "height"), (3, "width")):
            value.shape[axis] = name  # instead of the exporter's s77
    exported.save(str(path), external_data=False)
    return OnnxModel(path)


def _write_torch(program: ExportedProgram, description: str, path: Path) -> Callable[[Tensor], Tensor]:
    _without_ceil(program)
    torch.export.save(program, path, extra_files={f"{METADATA}.json": description})
    module: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return module


def _without_ceil(program: ExportedProgram) -> None:
    """Replace ceil(a / b), by which timm pads some networks, with whole numbers: torch cannot store a ceil."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is not math.ceil or node.args[0].target is not operator.truediv:
            continue
        length, step = node.args[0].args
        with graph.inserting_before(node):
            more = graph.call_function(operator.add, (length, step - 1))
            fewer = graph.call_function(operator.floordiv, (more, step))
        more.meta["val"] = length.meta["val"] + step - 1
        fewer.meta["val"] = more.meta["val"] // step
        node.replace_all_uses_with(fewer)
        graph.erase_node(node)
    program.graph_module.recompile()


def _checked(deployed: Deployed, run: Callable[[Tensor], Tensor], smallest: int, path: Path) -> Check:
    """Compare the file with the model on images of sizes that nobody chose, and both with the model in float64.

    What two programs that are both right differ by depends on the network: in a deep one that has learned little, or
    that is shown what it never saw, each layer multiplies the error of the one before. The same network in float64
    tells how much of a difference is such rounding.
    """
    rng = torch.Generator()
    rng.seed()
    exact = copy.deepcopy(deployed).double()
    sizes = []
    difference = rounding = largest = 0.0
    for _ in range(CHECKS):
        batch = int(torch.randint(1, 4, (), generator=rng))
        height, width = (int(side) for side in torch.randint(smallest, LARGEST_SIDE, (2,), generator=rng))
        images = pictures(batch, height, width, rng)
        with torch.inference_mode():
            expected, truth = deployed(images), exact(images.double())
        found = run(images)
        if found.shape != expected.shape or not torch.isfinite(found).all():
            raise ValueError(
                f"{path}: not written: for {batch} x 3 x {height} x {width} the exported model gave "
                f"{tuple(found.shape)}, finite or not, and the model {tuple(expected.shape)}; report this as a bug"
            )
        sizes.append((batch, height, width))
        difference = max(difference, float((found - expected).abs().max()))
        rounding = max(rounding, float((expected - truth).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    if difference > max(TOLERANCE, ROUNDINGS * rounding):
        raise ValueError(
            f"{path}: not written: its logits differ from the model's by up to {difference:.2g}; expected less than "
            f"{TOLERANCE:g}, or than {ROUNDINGS} times the {rounding:.2g} that are rounding; report this as a bug"
        )
    return Check(tuple(sizes), difference, rounding, largest)


def pictures(number: int, height: int, width: int, rng: torch.Generator) -> Tensor:
    """Pieces of drawn scenes, from 0 to 255: networks learn from pictures, and noise drives them out of range."""
    scenes = Scenes(size=(LARGEST_SIDE, LARGEST_SIDE))
    chosen = torch.randint(len(scenes), (number,), generator=rng).tolist()
    return torch.stack([scenes[index].image[:, :height, :width] for index in chosen]).float()
