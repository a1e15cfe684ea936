"""`caaseg predict`: labels and overlays of pictures."""

import sys
from pathlib import Path
from typing import Literal

from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.cli.words import Device, area_of, check_folder, check_writable, device_of, factor_of, words_of
from caaseg.config import OutputStride


def predict_pictures_with(
    model: str,
    inputs: list[str],
    *,
    out: Path,
    scales: str = "1.0",
    flip: bool = False,
    window: str | None = None,
    average: Literal["logits", "probabilities"] = "logits",
    output_stride: OutputStride | None = None,
    precision: Literal["32", "bf16"] = "32",
    compiled: bool = False,
    device: Device = "auto",
    probabilities: bool = False,
    compare_grids: bool = False,
    max_pixels: int = 89_000_000,
    json: str | None = None,
) -> int:
    """Predict pictures: labels as indexed PNG in OUT/labels, pictures under their colors in OUT/overlays.

    Results have the size of the picture as a viewer shows it, EXIF rotation applied, and its place below the folder
    that holds all inputs. What is done is skipped when the command is repeated; several at once, or the processes of
    torchrun, share the pictures. A file that cannot be read is reported, the rest goes on, and the exit code is 2.

    Args:
        model: a run's folder, the folder of a saved model, a hub id, or a file of caaseg export that ends in .onnx.
        inputs: images, folders with all below them, or patterns such as 'photos/**/*.jpg'.
        out: folder for the results of one model and one set of options.
        scales: factors of the pictures' size, comma-separated; the scores at all of them are averaged.
        flip: average with the scores of the mirrored pictures too.
        window: height x width of overlapping windows, in pixels of the picture, such as 1025x1025. None takes pictures
            of up to 2048 x 2048 pixels whole (fewer with more than 32 classes) and larger ones in windows of 513x513.
        average: what is averaged over scales, mirror images and windows.
        output_stride: another output stride than the model was trained with, 8 or 16.
        precision: what the network computes in.
        compiled: have torch.compile make the network faster first: half a minute or so a size of images, so it pays for
            many of few sizes.
        device: where to run; auto takes a GPU if there is one.
        probabilities: keep them too, as OUT/probabilities/NAME.npy, float16 of shape (height, width, classes).
        compare_grids: predict pictures that are cut into windows once more, the grid half a step further, and tell the
            share of pixels that get another class.
        max_pixels: larger pictures are refused before they are decoded.
        json: file for what became of each picture; - is standard output.
    """
    from dataclasses import asdict
    from datetime import timedelta

    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.inputs import find_images
    from caaseg.evaluation.evaluate import join_processes
    from caaseg.models.inference import load_for_inference
    from caaseg.predictions import (
        OUTPUT_DIRECTORIES,
        PredictOptions,
        PredictTask,
        gather_outcomes,
        predict_images,
        summary,
    )

    check_folder(out, "--out")
    check_writable(json=json)
    if max_pixels < 1:
        raise ValueError(f"--max-pixels is {max_pixels}; expected 1 or more")
    options = PredictOptions(
        scales=tuple(factor_of(word, "--scales") for word in words_of(scales, "--scales")),
        flip=flip,
        window=None if window is None else area_of(window, "--window"),
        average=average,
        precision=precision,
    )
    found = find_images(inputs, exclude=[out / folder for folder in OUTPUT_DIRECTORIES])
    console = console_for(json)
    patience = timedelta(days=30)  # a process that is done waits for one that got the larger pictures
    with join_processes(device_of(device), timeout=patience) as (place, rank, ranks), progress_bars(console) as report:
        task = PredictTask(
            model=load_for_inference(
                model, output_stride=output_stride, precision=precision, compile=compiled, device=place
            ),
            options=options,
            out=out,
            probabilities=probabilities,
            compare_grids=compare_grids,
            max_pixels=max_pixels,
        )
        shown = report if rank == 0 else (lambda *_: None)
        outcomes = gather_outcomes(predict_images(task, found.images, share=(rank, ranks), progress=shown))
    if rank > 0:  # the first process speaks for all
        return 0
    messages = [*found.errors, *(outcome.message for outcome in outcomes if outcome.message is not None)]
    for line in summary(outcomes, found.skipped, out):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if json is not None:
        became = {"pictures": [asdict(outcome) for outcome in outcomes], "faults": found.errors}
        write_json({**provenance(place, COMMAND_LINE), "model": model, **became}, json, console)
    for message in messages:
        print(f"caaseg: {message}", file=sys.stderr)
    return 2 if messages else 0
