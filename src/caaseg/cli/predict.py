"""`caaseg predict`: labels and overlays for images, overlay videos for videos."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from caaseg.cli.arguments import Device, ImageSize, Scales, check_directory, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, printable, progress_bars, write_json
from caaseg.config import Count, OutputStride, Size


def predict(
    model: str,
    inputs: list[str],
    *,
    out: Path,
    size: ImageSize = "auto",
    scales: Scales = (1.0,),
    flip: bool = False,
    window: Size | None = None,
    average: Literal["logits", "probabilities"] = "logits",
    output_stride: OutputStride | None = None,
    precision: Literal["32", "bf16"] = "32",
    compiled: bool = False,
    device: Device = "auto",
    source_values: bool = False,
    probabilities: bool = False,
    compare_grids: bool = False,
    max_pixels: Count = 89_000_000,
    smooth: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    legend: bool = False,
    json: str | None = None,
) -> int:
    """Predict images: labels as indexed PNG in OUT/labels, overlays in OUT/overlays. A video gets an overlay video.

    Results have the size of the displayed image, with EXIF rotation applied, and keep the directory structure of the
    inputs. Finished images are skipped when the command is repeated, and an unfinished video is continued. Commands
    that run at the same time, processes of torchrun and tasks of a SLURM job array share the images. A file that cannot
    be read is reported at the end, and the exit code is 2.

    Args:
        model: a run, a model directory, a shipped model such as camvid, hf://owner/name, or an .onnx file of caaseg
            export.
        inputs: images, videos, directories (searched recursively) or patterns such as 'photos/**/*.jpg'.
        out: directory for the results of one model and one set of options.
        size: size at which images are predicted: auto (that of the training images), native (their own), the length of
            the short side, or height and width. Results have the size of the image.
        scales: image scales to average over.
        flip: average over flipped images too.
        window: height and width of overlapping windows in pixels of the resized image, such as 1025 1025. By default,
            images of up to 2048 x 2048 pixels are predicted whole, and larger ones in windows of 513 x 513; the limit
            is lower with more than 32 classes.
        average: average logits or probabilities over scales, flips and windows.
        output_stride: another output stride than the model was trained with.
        precision: precision of the model.
        compiled: compile the model with torch.compile first; it takes about half a minute per image size.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        source_values: write labels with the values or colors of the masks in the dataset folder that the model was
            trained on, such as 0 and 255, instead of class ids.
        probabilities: save probabilities too, as OUT/probabilities/NAME.npy, float16 of shape (height, width, classes).
        compare_grids: predict images that are divided into windows a second time with shifted windows, and report the
            fraction of pixels whose class changes.
        max_pixels: images with more pixels are refused before decoding.
        legend: draw the names and colors of the classes right of overlays; videos always have them.
        smooth: weight of the earlier frames of a video in an exponential moving average of the scores, 0 or more and
            below 1; 0.7 makes classes flicker less.
        json: file for the result of each image; - is standard output.
    """
    from dataclasses import asdict
    from datetime import timedelta

    from caaseg import predictions
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.inputs import find_images
    from caaseg.models.inference import load_for_inference
    from caaseg.prediction_directory import OUTPUT_DIRECTORIES
    from caaseg.process_group import join_processes

    check_directory(out, "--out")
    check_writable([model, *inputs], json=json)
    options = predictions.PredictOptions(
        size=size,
        scales=scales,
        flip=flip,
        window=window,
        average=average,
        precision=precision,
        source_values=source_values,
        smooth=smooth,
        legend=legend,
    )
    found = find_images(inputs, exclude=[out / name for name in OUTPUT_DIRECTORIES])
    array_index, array_size = predictions.array_task()
    console = console_for(json)
    timeout = timedelta(days=30)  # finished processes wait for those with larger images
    with (
        join_processes(device_of(device), timeout=timeout) as (torch_device, rank, ranks),
        progress_bars(console) as report,
    ):
        task = predictions.PredictTask(
            model=load_for_inference(
                model, output_stride=output_stride, precision=precision, compile=compiled, device=torch_device
            ),
            options=options,
            out=out,
            probabilities=probabilities,
            compare_grids=compare_grids,
            max_pixels=max_pixels,
        )
        shown = report if rank == 0 else (lambda *_: None)
        share = (array_index * ranks + rank, array_size * ranks)
        done = predictions.predict_images(task, found.images, share=share, progress=shown)
        outcomes = predictions.gather_outcomes(done)
    if rank > 0:  # only the first process prints
        return 0
    messages = [*found.errors, *(outcome.message for outcome in outcomes if outcome.message is not None)]
    for line in predictions.summary(outcomes, found.skipped, out):
        console.print(printable(line), soft_wrap=True)
    if array_size > 1:
        task_of = f"SLURM array task {array_index + 1} of {array_size}"
        console.print(f"{task_of}: {len(outcomes)} of {len(found.images)} images", soft_wrap=True)
    if json is not None:
        results = {"images": [asdict(outcome) for outcome in outcomes], "faults": found.errors}
        write_json({**provenance(torch_device, COMMAND_LINE), "model": model, **results}, json, console)
    for message in messages:
        print(f"caaseg: {printable(message)}", file=sys.stderr)
    return 2 if messages else 0
