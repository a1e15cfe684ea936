"""Export to ONNX or torch.export.

Exported models take RGB values from 0 to 255, normalize them, and return logits at the size of the images. Batch,
height and width are dynamic.
"""

import copy
import io
import json
import logging
import math
import operator
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import caaseg
from caaseg.data.datasets.scenes import Scenes
from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.models.export_layers import largest_window, replace_layers
from caaseg.models.onnx import INPUT, INSTALL, OUTPUT, OnnxModel, disable_telemetry
from caaseg.models.segmenter import Segmenter
from caaseg.models.winograd import TILE, use_winograd

if TYPE_CHECKING:
    import onnx_ir

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
METADATA = "caaseg"
"""Name of the description: a metadata property of an ONNX file, an extra file caaseg.json of a .pt2."""
TOLERANCE = 1e-3
"""Maximum difference of logits that counts as rounding."""
MAX_ROUNDING_FACTOR = 10
"""Maximum difference relative to the model's own float32 rounding error, which is large for some networks."""
NUM_CHECKS = 10
MAX_SIDE = 200
"""Maximum height and width of the images in the check."""


class Deployed(nn.Module):
    """The exported network: RGB values from 0 to 255 in, logits out."""

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        # All implementations give the same numbers, but only this one exports with dynamic sizes.
        self.model = model.rebuild(implementation="factorised").cpu().float()
        replace_layers(self.model)
        for name, levels in (("mean", model.backbone.mean), ("std", model.backbone.std)):
            self.register_buffer(name, torch.tensor(levels).view(3, 1, 1) * 255)
        self.mean: Tensor
        self.std: Tensor
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images - self.mean) / self.std).logits
        return logits


class Check(NamedTuple):
    """Comparison of the exported file with the model."""

    sizes: tuple[tuple[int, int, int], ...]  # batch, height, width
    difference: float  # maximum over all logits at all sizes
    rounding: float  # maximum difference between the model in float32 and in float64
    largest_logit: float


def export_model(model: Segmenter, path: Path, kind: Format = "onnx", *, winograd: bool = False) -> Check:
    """Export a model; the file is written only if its outputs agree with the model's.

    Args:
        model: the model.
        path: output file, with the suffix .onnx or .pt2.
        kind: onnx, or torch for torch.export.
        winograd: compute large 3 x 3 convolutions by Winograd's algorithm; CaasegError if the model has none.
    """
    check_target(path, kind)
    deployed = exported = Deployed(model)
    strides = getattr(model.backbone, "level_strides", ())
    coarsest = max([model.config.output_stride, *strides])
    # Two or more features and attention windows per side: torch.export specializes the program to a single one.
    smallest, side = coarsest + 1, coarsest * largest_window(deployed) + 1
    if winograd:
        exported = Deployed(model)
        exported.model, dilation = use_winograd(deployed.model)
        side = max(side, model.config.output_stride * TILE * dilation + 1)  # two tiles per side
    with atomic_write(path) as file:
        with warnings.catch_warnings(action="ignore"):  # warnings of torch's exporter about its internals
            example = torch.rand(2, 3, 4 * side, 3 * side) * 255
            dynamic_sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
            program = torch.export.export(exported, (example,), dynamic_shapes=(dynamic_sizes,), strict=False)
            description = json.dumps(_description(model, 1 if kind == "onnx" else smallest))
            run = {"onnx": _write_onnx, "torch": _write_torch}[kind](program, description, file)
        return check_export(deployed, run, 1 if kind == "onnx" else smallest, path)


def check_target(path: Path, kind: Format = "onnx") -> None:
    """Raise an error if the file name lacks the suffix of the format, or if a package is missing."""
    if path.suffix != SUFFIXES[kind]:
        raise CaasegError(f"{path}: expected a name that ends in {SUFFIXES[kind]} for the format {kind}")
    if kind == "onnx":
        _check_exporter()


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
        "mask_values": config.mask_values,
        "short_sides": config.short_sides,
        "min_size": config.min_size,
        "license": config.license,
        "mean": model.backbone.mean,
        "std": model.backbone.std,
        "head": config.head,
        "backbone": config.backbone,
        "output_stride": config.output_stride,
    }


def _check_exporter() -> None:
    """Raise an error if a package for ONNX export is missing."""
    disable_telemetry()
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError as error:
            raise CaasegError(f"exporting to ONNX needs {name}, which is not installed; {INSTALL}") from error


def _write_onnx(program: ExportedProgram, description: str, path: Path) -> Callable[[Tensor], Tensor]:
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it warns about its own optimizations
    exported = torch.onnx.export(program, dynamo=True, verbose=False, input_names=[INPUT], output_names=[OUTPUT])
    assert exported is not None
    exported.model.metadata_props[METADATA] = description
    _pool_globally(exported.model.graph)
    for value in (*exported.model.graph.inputs, *exported.model.graph.outputs):
        assert value.shape is not None
        for axis, name in ((0, "batch"), (2, "height"), (3, "width")):
            value.shape[axis] = name  # instead of names like s77
    exported.save(str(path), external_data=False)
    return OnnxModel(path)


def _pool_globally(graph: "onnx_ir.Graph") -> None:
    """Replace means over all pixels by GlobalAveragePool, which onnxruntime computes several times as fast."""
    for node in graph:
        if node.op_type != "ReduceMean" or node.attributes.get_int("keepdims", 1) != 1 or len(node.inputs) != 2:
            continue
        features, axes = node.inputs
        if features is None or features.shape is None or axes is None or axes.const_value is None:
            continue
        rank = len(features.shape)
        if rank == 4 and sorted(axis % rank for axis in axes.const_value.numpy().tolist()) == [2, 3]:
            node.op_type = "GlobalAveragePool"
            node.resize_inputs(1)
            node.attributes.clear()
            if axes.name is not None and not axes.uses():  # onnxruntime warns about unused values
                graph.initializers.pop(axes.name, None)


def _write_torch(program: ExportedProgram, description: str, path: Path) -> Callable[[Tensor], Tensor]:
    _replace_ceil(program)
    content = io.BytesIO()  # torch aborts the process if it cannot write to a full disk
    torch.export.save(program, content, extra_files={f"{METADATA}.json": description})
    path.write_bytes(content.getbuffer())
    module: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return module


def _replace_ceil(program: ExportedProgram) -> None:
    """Replace ceil(a / b), with which timm pads some networks, by integer operations: torch cannot save a ceil."""
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


def check_export(deployed: Deployed, run: Callable[[Tensor], Tensor], smallest: int, path: Path) -> Check:
    """Compare the exported file with the model on images of random sizes, and the model in float32 with float64.

    The rounding difference between two correct programs depends on the network. Deep networks amplify errors from layer
    to layer if they are little trained, or if the images are unlike their training data. The difference between float32
    and float64 measures this amplification.
    """
    rng = torch.Generator()
    rng.seed()
    exact = copy.deepcopy(deployed).double()
    sizes = []
    difference = rounding = largest = 0.0
    for _ in range(NUM_CHECKS):
        batch = int(torch.randint(1, 4, (), generator=rng))
        height, width = (int(side) for side in torch.randint(smallest, MAX_SIDE, (2,), generator=rng))
        images = scene_images(batch, height, width, rng)
        with torch.inference_mode():
            expected, truth = deployed(images), exact(images.double())
        try:
            found = run(images)
        except AssertionError as error:  # a condition that torch.export has added to the program
            reason = str(error).splitlines()[0]
            raise CaasegError(
                f"{path}: not written: torch.export restricts the image sizes of this network ({reason}); export it to "
                "ONNX"
            ) from error
        if found.shape != expected.shape or not torch.isfinite(found).all():
            raise CaasegError(
                f"{path}: not written: for {batch} x 3 x {height} x {width} the exported model returned logits of "
                f"shape {tuple(found.shape)}, or logits that are not finite; expected finite logits of shape "
                f"{tuple(expected.shape)}; report this as a bug"
            )
        sizes.append((batch, height, width))
        difference = max(difference, float((found - expected).abs().max()))
        rounding = max(rounding, float((expected - truth).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    if difference > max(TOLERANCE, MAX_ROUNDING_FACTOR * rounding):
        raise CaasegError(
            f"{path}: not written: its logits differ from the model's by up to {difference:.2g}; expected less than "
            f"{TOLERANCE:g}, or {MAX_ROUNDING_FACTOR} times the rounding error of {rounding:.2g}; report this as a bug"
        )
    return Check(tuple(sizes), difference, rounding, largest)


def scene_images(number: int, height: int, width: int, rng: torch.Generator) -> Tensor:
    """Return crops of synthetic scenes, values from 0 to 255. Noise would drive networks out of their usual range."""
    scenes = Scenes(size=(MAX_SIDE, MAX_SIDE))
    chosen = torch.randint(len(scenes), (number,), generator=rng).tolist()
    return torch.stack([scenes[index].image[:, :height, :width] for index in chosen]).float()
