"""`caaseg export`: write a model as ONNX, in float32 or INT8, or as a torch.export program."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from caaseg.cli.arguments import check_writable
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import OutputStride
from caaseg.errors import CaasegError

if TYPE_CHECKING:
    from caaseg.data.calibration import Calibration
    from caaseg.data.sample import SegmentationDataset
    from caaseg.evaluation.int8 import Int8Scores


def export(
    model: str,
    *,
    out: Path | None = None,
    format: Literal["onnx", "torch"] = "onnx",
    output_stride: OutputStride | None = None,
    winograd: bool = False,
    int8: bool = False,
    calibrate: Path | None = None,
    dataset: str | None = None,
    root: Path | None = None,
    split: str = "val",
    json: str | None = None,
) -> int:
    """Write a model as ONNX or as a torch.export program with dynamic batch size, height and width.

    The exported model takes RGB values from 0 to 255 as float32 (batch, 3, height, width), normalizes them, and returns
    logits at the input size. Its metadata contains classes and colors. The file is only written if its outputs agree
    with the model on synthetic images of random sizes. caaseg predict accepts the .onnx file as a model. In a .pt2
    program, height and width must be larger than the output stride.

    With --int8, convolutions compute with 8-bit integers, which is faster on CPUs and changes some predictions. The
    ranges of the values come from the images of --calibrate. The mean IoU before and after is printed and stored, or,
    without labels, the share of pixels for which both models predict the same class.

    Args:
        model: a run, a model directory or hf://owner/name.
        out: the file; ends in .onnx, or in .pt2 for the format torch; by default the name of the model, with -int8 for
            --int8, in the current directory.
        format: onnx, or torch for torch.export.load.
        output_stride: another output stride than the model was trained with.
        winograd: compute large 3 x 3 convolutions by Winograd's algorithm, which is faster with onnxruntime on a CPU
            and needs more memory; for models such as ResNet-50, not for --int8.
        int8: quantize the ONNX model to INT8.
        calibrate: for --int8, a directory of images like those to predict, or the directory of a dataset, whose
            training images are used: CamVid, your own images and masks, or that of --dataset.
        dataset: for --int8, dataset name (see caaseg data list) of labeled images that score the model; by default that
            of --calibrate, if it has labels.
        root: directory of the dataset; by default that of --calibrate.
        split: split of the dataset that scores the model.
        json: file for the results of the comparisons; - is standard output; with --int8 by default the name of the
            model file and .json.
    """
    import torch

    from caaseg.benchmarks.provenance import provenance
    from caaseg.evaluation.int8 import export_int8
    from caaseg.models import load_model, with_output_stride
    from caaseg.models.export import SUFFIXES, export_model

    _check_options(int8, calibrate, dataset, root, winograd, format)
    out = out or Path(f"{Path(model).resolve().name}{'-int8' if int8 else ''}{SUFFIXES[format]}")
    if int8 and json is None:
        json = f"{out}.json"
    check_writable([model, calibrate, root], out=out, json=json)
    console = console_for(json)
    network = load_model(model)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    measured: dict[str, Any] = {"model": model, "file": str(out), "format": format}
    if calibrate is None:
        check = export_model(network, out, format, winograd=winograd)
    else:
        name, labeled, calibration = _open_images(calibrate, dataset, root, split)
        with progress_bars(console) as progress:
            check, scores = export_int8(network, out, calibration, dataset=labeled, progress=progress)
        on = None if name is None else {"dataset": name, "split": split}
        measured |= {"calibrate": str(calibrate), "scored_on": on, "int8": scores._asdict()}
    console.print(
        f"{len(check.sizes)} random sizes: logits differ by at most {check.difference:.1e} (the largest absolute logit "
        f"is {check.largest_logit:.3g}; float32 and float64 differ by {check.rounding:.1e})",
        highlight=False,
    )
    if calibrate is not None:
        for line in _score_lines(scores, "the images" if name is None else f"split {split} of {name}"):
            console.print(line, soft_wrap=True, highlight=False)
    console.print(f"model: {out}", soft_wrap=True, highlight=False)
    if json is not None:
        write_json({**provenance(torch.device("cpu"), COMMAND_LINE), **measured, **check._asdict()}, json, console)
    return 0


def _check_options(
    int8: bool, calibrate: Path | None, dataset: str | None, root: Path | None, winograd: bool, kind: str
) -> None:
    """Raise an error for options that do not fit together."""
    if int8 and calibrate is None:
        raise CaasegError("--int8 needs images for calibration; give a directory with --calibrate DIR")
    if int8 and (kind != "onnx" or winograd):
        other = "--winograd" if winograd else f"--format {kind}"
        raise CaasegError(f"--int8 is for plain ONNX files, but {other} was given; leave one of them out")
    for option, value in (("--calibrate", calibrate), ("--dataset", dataset), ("--root", root)):
        if not int8 and value is not None:
            raise CaasegError(f"{option} is {str(value)!r}, but it is for INT8 models only; add --int8 or leave it out")
    if root is not None and dataset is None:
        raise CaasegError(f"--root is {str(root)!r} without a dataset; add --dataset NAME or leave it out")


def _open_images(
    calibrate: Path, dataset: str | None, root: Path | None, split: str
) -> tuple[str | None, "SegmentationDataset | None", "Calibration"]:
    """Return the name and the labeled images of the dataset that scores the model, and the images for calibration."""
    from caaseg.data.calibration import find_dataset, open_calibration
    from caaseg.data.catalogue import find, open_dataset

    is_root = dataset is not None and root is None and find(dataset).has_files
    inside = dataset if is_root else find_dataset(calibrate)
    calibration = open_calibration(calibrate, inside)
    name = dataset or inside
    return name, None if name is None else open_dataset(name, root or calibrate, split), calibration


def _score_lines(scores: "Int8Scores", on: str) -> Iterator[str]:
    yield f"calibrated on {scores.calibration_images} images, compared on {scores.images} images ({on})"
    if scores.float32_mean_iou is None or scores.int8_mean_iou is None:
        yield "no labels, so the mean IoU is not known; give a labeled dataset with --dataset"
    else:
        before, after = 100 * scores.float32_mean_iou, 100 * scores.int8_mean_iou
        yield f"mean IoU: {before:.2f} in float32, {after:.2f} in INT8 ({after - before:+.2f})"
    yield f"float32 and INT8 predict the same class for {100 * scores.pixel_agreement:.2f}% of the pixels"
