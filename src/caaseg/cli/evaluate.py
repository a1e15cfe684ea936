"""`caaseg evaluate`: mean IoU and other metrics of a model on a dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from caaseg.cli.arguments import Device, ImageSize, Scales, check_directory, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import Count, OutputStride, Size, Workers
from caaseg.errors import CaasegError

if TYPE_CHECKING:
    import torch

    from caaseg.data.sample import Batch


def evaluate(
    model: str,
    *,
    dataset: str,
    root: Path | None = None,
    split: str = "val",
    size: ImageSize = "auto",
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
        model: a run, a model directory, a shipped model such as camvid, hf://owner/name, or an .onnx file.
        dataset: dataset name (see caaseg data list); it defines the classes that are scored.
        root: directory of the dataset; scenes need none.
        split: train, val or test.
        size: size at which images are predicted: auto (that of the training images), native (their own), the length of
            the short side, or height and width. Scores are computed at the size of the labels.
        scales: image scales to average over.
        flip: average over flipped images too.
        window: height and width of sliding windows, such as 513 513; none predicts whole images, except those of more
            than 2048 x 2048 pixels.
        average: average logits or probabilities over scales, flips and windows.
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
    from caaseg.evaluation import evaluate as evaluating
    from caaseg.evaluation.best_worst import BestWorstImages
    from caaseg.models.inference import load_for_inference
    from caaseg.models.predictor import Predictor
    from caaseg.process_group import join_processes
    from caaseg.reports import evaluation as reports

    check_writable([model, root], json=json, page=page)
    if submission is not None:
        if dataset != "cityscapes":
            raise CaasegError(f"--submission is for the Cityscapes server, but --dataset is {dataset}; leave it out")
        check_directory(submission, "--submission")
    data = open_dataset(dataset, root, split)
    console = console_for(json)
    done, best_worst = 0, BestWorstImages(len(data.classes))
    with join_processes(device_of(device)) as (torch_device, rank, ranks), progress_bars(console) as report:
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

        loaded = load_for_inference(
            model, output_stride=output_stride, precision=precision, compile=compiled, device=torch_device
        )
        evaluating.check_classes(loaded.num_classes, data)
        predictor = Predictor(
            loaded.network, size=size, scales=scales, flip=flip, window=window, average=average, precision=precision
        )
        evaluation = evaluating.evaluate(
            predictor, data, boundary=boundary, batch_size=batch_size, workers=workers, on_batch=on_batch
        )
    if rank > 0:  # only the first process prints
        return 0
    scored = reports.describe_data(dataset, split, evaluation)
    protocol = reports.describe_protocol(predictor, loaded.output_stride)
    if evaluation.confusion.any():
        console.print(reports.score_table(evaluation))
    for line in reports.score_lines(evaluation, scored, protocol):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if loaded.classes not in (None, data.classes):
        console.print("Note: the class names of the model and the dataset differ; check that the classes are the same.")
    if submission is not None:
        console.print(f"submission: {submission}", soft_wrap=True, highlight=False)
    if page is not None:
        reports.write_evaluation_page(
            page,
            title=Path(model).resolve().name,
            data=scored,
            protocol=protocol,
            evaluation=evaluation,
            best_worst=best_worst,
            palette=data.palette,
            origin=provenance(torch_device, COMMAND_LINE),
        )
        console.print(f"page: {page}", soft_wrap=True, highlight=False)
    if json is not None:
        described = {"model": model, "dataset": dataset, "split": split, "data": scored, "protocol": protocol}
        content = {**provenance(torch_device, COMMAND_LINE), **described, **reports.scores_as_json(evaluation)}
        write_json(content, json, console)
    return 0
