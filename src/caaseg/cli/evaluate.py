"""`caaseg evaluate`: score a model as the field does."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.cli.words import Device, area_of, check_folder, check_writable, device_of, factor_of, words_of
from caaseg.config import OutputStride

if TYPE_CHECKING:
    import torch

    from caaseg.data.sample import Batch


def evaluate_model(  # not `evaluate`: jsonargparse looks a command up in caaseg by its name, and would load torch
    model: str,
    *,
    dataset: str,
    root: Path | None = None,
    split: str = "val",
    scales: str = "1.0",
    flip: bool = False,
    window: str | None = None,
    average: Literal["logits", "probabilities"] = "logits",
    output_stride: OutputStride | None = None,
    boundary: bool = False,
    precision: Literal["32", "bf16"] = "32",
    compiled: bool = False,
    device: Device = "auto",
    workers: int = 2,
    batch_size: int = 1,
    json: str | None = None,
    page: Path | None = None,
    submission: Path | None = None,
) -> int:
    """Score a model: mean IoU, pixel and mean accuracy, class by class.

    Started by torchrun, its processes share the images.

    Args:
        model: a run's folder, the folder of a saved model, or a hub id.
        dataset: a name of caaseg data list; it says how classes are counted, as pascal_context (59) does.
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        scales: factors of the images' size, comma-separated; the scores at all of them are averaged.
        flip: average with the scores of the mirrored images too.
        window: height x width of sliding windows, such as 513x513; none takes images whole.
        average: what is averaged over scales, mirror images and windows.
        output_stride: another output stride than the model was trained with, 8 or 16.
        boundary: boundary IoU too, within 2% of the image's diagonal.
        precision: what the network computes in.
        compiled: have torch.compile make the network faster first: half a minute or so a size of images, so it pays for
            many of few sizes.
        device: where to run; auto takes a GPU if there is one.
        workers: processes that read images while the model computes.
        batch_size: images at once; above 1 they must be of one size.
        json: file for the scores and the confusion matrix; - is standard output.
        page: file for a page (.html) with scores, confusions, and the images that it did best and worst on.
        submission: for cityscapes, folder for predictions as the evaluation server reads them.
    """
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import open_dataset
    from caaseg.data.datasets.cityscapes import save_submission
    from caaseg.evaluation.best_worst import BestWorstImages
    from caaseg.evaluation.evaluate import check_classes, evaluate, join_processes
    from caaseg.models import load_model, with_output_stride
    from caaseg.models.inference import prepare_for_inference
    from caaseg.models.predictor import Predictor
    from caaseg.reports import evaluation as reports

    check_writable(json=json, page=page)
    if submission is not None:
        if dataset != "cityscapes":
            raise ValueError(f"--submission is for the Cityscapes server, but --dataset is {dataset}; leave it out")
        check_folder(submission, "--submission")
    factors = [factor_of(word, "--scales") for word in words_of(scales, "--scales")]
    area = None if window is None else area_of(window, "--window")
    data = open_dataset(dataset, root, split)
    network = load_model(model)
    check_classes(network.config.num_classes, data)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    console = console_for(json)
    done, best_worst = 0, BestWorstImages(len(data.classes))
    with join_processes(device_of(device)) as (place, rank, ranks), progress_bars(console) as report:
        if page is not None and ranks > 1:
            raise ValueError(f"--page looks at every image, but {ranks} processes share them; start one process")

        def seen(batch: "Batch", predictions: "torch.Tensor") -> None:
            nonlocal done
            done += len(batch.names)
            if rank == 0:
                report("images", done, -(-len(data) // ranks))
            if page is not None:
                best_worst.update(batch, predictions)
            if submission is not None:
                for name, prediction in zip(batch.names, predictions.cpu().numpy(), strict=True):
                    save_submission(prediction, name, submission)

        prepared = prepare_for_inference(network, device=place, compile=compiled)
        predictor = Predictor(prepared, scales=factors, flip=flip, window=area, average=average, precision=precision)
        evaluation = evaluate(predictor, data, boundary=boundary, batch_size=batch_size, workers=workers, on_batch=seen)
    if rank > 0:  # the first process speaks for all
        return 0
    on = reports.describe_data(dataset, split, evaluation)
    how = reports.describe_protocol(predictor, network.config.output_stride)
    if evaluation.confusion.any():
        console.print(reports.score_table(evaluation))
    for line in reports.score_lines(evaluation, on, how):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if network.config.classes not in (None, data.classes):
        console.print("Note: the model names its classes otherwise than the data do; check that they are the same.")
    if submission is not None:
        console.print(f"submission: {submission}", soft_wrap=True, highlight=False)
    if page is not None:
        reports.write_evaluation_page(
            page,
            title=Path(model).resolve().name,
            data=on,
            protocol=how,
            evaluation=evaluation,
            best_worst=best_worst,
            palette=data.palette,
            origin=provenance(place, COMMAND_LINE),
        )
        console.print(f"page: {page}", soft_wrap=True, highlight=False)
    if json is not None:
        described = {"model": model, "dataset": dataset, "split": split, "on": on, "how": how}
        content = {**provenance(place, COMMAND_LINE), **described, **reports.scores_as_json(evaluation)}
        write_json(content, json, console)
    return 0
