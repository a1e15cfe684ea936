"""`caaseg export`: write a model as ONNX or as a torch.export program."""

from pathlib import Path
from typing import Literal

from caaseg.cli.arguments import check_writable
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import OutputStride


def export(
    model: str,
    *,
    out: Path,
    format: Literal["onnx", "torch"] = "onnx",
    output_stride: OutputStride | None = None,
    json: str | None = None,
) -> int:
    """Write a model as ONNX or as a torch.export program with dynamic batch size, height and width.

    The exported model takes RGB values from 0 to 255 as float32 (batch, 3, height, width), normalizes them, and returns
    logits at the input size. Its metadata contains classes and colors. The file is only written if its outputs agree
    with the model on synthetic images of random sizes. caaseg predict accepts the .onnx file as a model. In a .pt2
    program, height and width must be larger than the output stride.

    Args:
        model: a run, a model directory or hf://owner/name.
        out: the file; ends in .onnx, or in .pt2 for the format torch.
        format: onnx, or torch for torch.export.load.
        output_stride: another output stride than the model was trained with.
        json: file for the results of the comparison; - is standard output.
    """
    import torch

    from caaseg.benchmarks.provenance import provenance
    from caaseg.models import load_model, with_output_stride
    from caaseg.models.export import export_model

    check_writable([model], out=out, json=json)
    network = load_model(model)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    check = export_model(network, out, format)
    console = console_for(json)
    console.print(
        f"{len(check.sizes)} random sizes: logits differ by at most {check.difference:.1e} (they are up to "
        f"{check.largest_logit:.3g}, and differ by {check.rounding:.1e} from float64)",
        highlight=False,
    )
    console.print(f"model: {out}", soft_wrap=True, highlight=False)
    if json is not None:
        measured = {"model": model, "file": str(out), "format": format, **check._asdict()}
        write_json({**provenance(torch.device("cpu"), COMMAND_LINE), **measured}, json, console)
    return 0
