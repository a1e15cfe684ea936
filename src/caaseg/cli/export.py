"""`caaseg export`: a model for other software."""

from pathlib import Path
from typing import Literal

from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.cli.words import check_writable
from caaseg.config import OutputStride


def export_to_file(
    model: str,
    *,
    out: Path,
    format: Literal["onnx", "torch"] = "onnx",  # noqa: A002  the option's name
    output_stride: OutputStride | None = None,
    json: str | None = None,
) -> int:
    """Write a model as ONNX or as a program of torch.export, with open batch, height and width.

    It takes RGB values from 0 to 255 as float32 (batch, 3, height, width), normalizes inside, and gives logits at the
    images' size. The file names classes, colors and the rest in its metadata. Before it is left there, it is compared
    with the model on drawn images of random sizes. caaseg predict takes the .onnx file as a model. A .pt2 program
    refuses sides that are not longer than the output stride; ONNX takes any.

    Args:
        model: a run's folder, the folder of a saved model, or a hub id.
        out: the file; ends in .onnx, or in .pt2 for the format torch.
        format: onnx, or torch for torch.export.load.
        output_stride: another output stride than the model was trained with, 8 or 16.
        json: file for how the comparison went; - is standard output.
    """
    import torch

    from caaseg.benchmarks.provenance import provenance
    from caaseg.models import load_model, with_output_stride
    from caaseg.models.export import export_model

    check_writable(out=out, json=json)
    network = load_model(model)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    check = export_model(network, out, format)
    console = console_for(json)
    console.print(
        f"{len(check.sizes)} random sizes: logits differ by at most {check.difference:.1e} (they are up to "
        f"{check.largest_logit:.3g}, and off by {check.rounding:.1e} from what float64 gives)",
        highlight=False,
    )
    console.print(f"model: {out}", soft_wrap=True, highlight=False)
    if json is not None:
        measured = {"model": model, "file": str(out), "format": format, **check._asdict()}
        write_json({**provenance(torch.device("cpu"), COMMAND_LINE), **measured}, json, console)
    return 0
