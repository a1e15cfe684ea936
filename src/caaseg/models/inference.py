"""Models prepared for inference: loaded, batch norm folded, compiled, captured as CUDA graphs."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from caaseg.config import Color, MaskValues, OutputStride
from caaseg.data.labels import distinct_colors
from caaseg.errors import CaasegError
from caaseg.files import hash_files
from caaseg.models.cuda_graphs import CapturedModel
from caaseg.models.folding import compile_for_inference, fold_batch_norm
from caaseg.models.onnx import ONNX_SUFFIX, OnnxModel, onnx_files
from caaseg.models.saving import load_model, log_license
from caaseg.models.segmenter import Segmenter, with_output_stride


class LoadedModel(NamedTuple):
    """A model prepared for inference, with classes and colors for its predictions."""

    network: nn.Module
    num_classes: int
    classes: tuple[str, ...] | None
    palette: tuple[Color, ...]
    digest: str  # SHA-256 of the settings and weights
    source: str = ""  # path or hub id, as passed by the caller
    output_stride: int | None = None  # None for an exported model
    mask_values: MaskValues | None = None  # of the training masks, if known


def prepare_for_inference(
    model: Segmenter,
    *,
    device: torch.device | str,
    output_stride: OutputStride | None = None,
    compile: bool = False,  # noqa: A002
    capture: bool = True,
) -> nn.Module:
    """Return a copy of a model for inference only, with the same outputs up to rounding.

    Args:
        model: the model, which is not changed.
        device: where to run.
        output_stride: output stride, if different from that of training; None for that of training.
        compile: use torch.compile, which takes about half a minute per image size.
        capture: capture CUDA graphs on a GPU; a CPU ignores it.
    """
    if output_stride is not None:
        model = with_output_stride(model, output_stride)
    check_implementation_runs(model.config.implementation, torch.device(device))
    folded = fold_batch_norm(model).to(device)
    if compile:
        compile_for_inference(folded)
    return CapturedModel(folded) if capture and torch.device(device).type == "cuda" else folded


def check_implementation_runs(implementation: str, device: torch.device) -> None:
    """Raise CaasegError if an implementation of the attention needs another device."""
    if implementation == "fused" and device.type != "cuda":
        raise CaasegError(f"implementation is fused, which needs a GPU, but the device is {device}; use auto")


def load_for_inference(
    source: str,
    *,
    device: torch.device | str = "cpu",
    output_stride: OutputStride | None = None,
    precision: str = "32",
    compile: bool = False,  # noqa: A002
) -> LoadedModel:
    """Load a model and prepare it for inference.

    Args:
        source: a run directory, the directory of a saved model, a hub id, or an exported .onnx file.
        device: where to run.
        output_stride: output stride, if different from that of training; not for .onnx files.
        precision: compute precision that the caller will use; .onnx files have 32 only.
        compile: use torch.compile; not for .onnx files.
    """
    if source.lower().endswith(ONNX_SUFFIX):
        options = {"--output-stride": output_stride is not None, "--compiled": compile}
        options[f"--precision {precision}"] = precision != "32"
        for option, is_set in options.items():
            if is_set:
                raise CaasegError(f"{source}: {option} does not apply to an exported model; leave it out")
        exported = OnnxModel(Path(source), device=device)
        digest = hash_files(*onnx_files(Path(source)))
        palette = exported.palette or distinct_colors(exported.num_classes)
        values = exported.config.mask_values
        return LoadedModel(
            exported, exported.num_classes, exported.classes, palette, digest, source, mask_values=values
        )
    model = load_model(source)
    log_license(source, model.config)
    if output_stride is not None:
        model = with_output_stride(model, output_stride)
    config = model.config
    hashed = hashlib.sha256(json.dumps(config.as_dict()).encode())
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    network = prepare_for_inference(model, device=device, compile=compile)
    palette = config.palette or distinct_colors(config.num_classes)
    digest, stride = hashed.hexdigest(), config.output_stride
    return LoadedModel(network, config.num_classes, config.classes, palette, digest, source, stride, config.mask_values)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed. PyTorch's CPU allocator raises RuntimeError, so the message is checked."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # Messages of the allocator on Linux and Windows, and of tensors whose number of bytes does not fit into 64 bits.
    messages = ("allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
