"""`caaseg evaluate`: mean IoU and other metrics of a model on a dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from caaseg.cli.arguments import Device, Scales, check_directory, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import Count, OutputStride, Size, Workers
from caaseg.errors import CaasegError

if TYPE_CHECKING:
    import torch

    from caaseg.data.sample import Batch


def evaluate_model(
    model: str,
    *,
    dataset: str,
    root: Path | None = None,
    split: str = "val",
    scales: Scales = (1.0,),
    flip: bool = False,
    window: Size | None = None,
    average: Literal["logits", "probabilities"] = "logits",
    output_stride: OutputStride | None = None,
    boundary: bool = False,
    precision: Literal["32", "bf16"] = "32",
    compiled: bool = False,
    device: Device = "auto",
    workers: Workers = 2,
    batch_size: Count = 1,
    json: str | None = None,
    page: Path | None = None,
    submission: Path | None = None,
) -> int:
    """Evaluate a model: mean IoU, pixel accuracy, mean accuracy and the scores per class.

    Under torchrun, the processes share the images.

    Args:
        model: a run, a model directory or hf://owner/name.
        dataset: dataset name (see caaseg data list); it decides which classes count.
        root: directory of the dataset; scenes need none.
        split: train, val or test.
        scales: image scales to average over.
        flip: average over flipped images too.
        window: height and width of sliding windows, such as 513 513; none predicts whole images.
        average: what to average over scales, flips and windows.
        output_stride: another output stride than the model was trained with.
        boundary: also compute boundary IoU, within 2% of the image diagonal.
        precision: precision of the model.
        compiled: compile the model with torch.compile first; it takes about half a minute per image size.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        workers: data loading processes.
        batch_size: images per batch; above 1, all images must have the same size.
        json: file for the scores and the confusion matrix; - is standard output.
        page: file for a report (.html) with scores, confusions, and the best and worst images.
        submission: for cityscapes, directory for predictions in the format of the evaluation server.
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
            raise CaasegError(f"--submission is for the Cityscapes server, but --dataset is {dataset}; leave it out")
        check_directory(submission, "--submission")
    data = open_dataset(dataset, root, split)
    network = load_model(model)
    check_classes(network.config.num_classes, data)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    console = console_for(json)
    done, best_worst = 0, BestWorstImages(len(data.classes))
    with join_processes(device_of(device)) as (place, rank, ranks), progress_bars(console) as report:
        if page is not None and ranks > 1:
            raise CaasegError(f"--page needs all images, but {ranks} processes share them; start one process")

        def on_batch(batch: "Batch", predictions: "torch.Tensor") -> None:
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
        predictor = Predictor(prepared, scales=scales, flip=flip, window=window, average=average, precision=precision)
        evaluation = evaluate(
            predictor, data, boundary=boundary, batch_size=batch_size, workers=workers, on_batch=on_batch
        )
    if rank > 0:  # only the first process prints
        return 0
    on = reports.describe_data(dataset, split, evaluation)
    how = reports.describe_protocol(predictor, network.config.output_stride)
    if evaluation.confusion.any():
        console.print(reports.score_table(evaluation))
    for line in reports.score_lines(evaluation, on, how):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if network.config.classes not in (None, data.classes):
        console.print("Note: the class names of the model and the dataset differ; check that the classes are the same.")
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
