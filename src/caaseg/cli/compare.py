"""`caaseg compare`: predictions of several models side by side."""

from pathlib import Path

from caaseg.cli.arguments import Device, Figure, Names, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import Count, Workers
from caaseg.errors import CaasegError


def compare(
    models: list[str],
    *,
    dataset: str,
    out: Figure,
    root: Path | None = None,
    split: str = "val",
    images: Count | Names = 4,
    device: Device = "auto",
    workers: Workers = 2,
    json: str | None = None,
) -> int:
    """Draw images, labels and the predictions of several models side by side, with boxes where they differ most.

    Images are chosen by name, or automatically if their number is given: the split is divided into this number of
    parts, and the image of each part on which the models differ most is drawn. The parts avoid similar images, such as
    neighboring video frames.

    Args:
        models: two or more models with the same classes, each a run, a model directory or hf://owner/name.
        dataset: dataset name (see caaseg data list).
        out: file for the figure (.png, .svg or .pdf).
        root: directory of the dataset; scenes need none.
        split: train, val or test.
        images: names of the images to draw, or their number.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        workers: data loading processes.
        json: file for the numbers of all images; - is standard output.
    """
    from caaseg.analysis import compare as analysis
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import open_dataset
    from caaseg.evaluation.evaluate import check_classes
    from caaseg.models import load_model
    from caaseg.reports.compare import comparison_as_json, comparison_lines, draw_comparison, model_names
    from caaseg.reports.figures import save

    check_writable([*models, root], json=json, out=out)
    if len(models) < 2:
        raise CaasegError(f"{models[0]} is the only model; expected two or more to compare")
    torch_device = device_of(device)
    data = open_dataset(dataset, root, split)
    if not isinstance(images, int):
        analysis.check_names(images, data)
    networks = [load_model(model).to(torch_device) for model in models]
    first = networks[0].config
    for model, network in zip(models, networks, strict=True):
        ours = network.config
        if ours.num_classes != first.num_classes or (ours.classes and first.classes and ours.classes != first.classes):
            raise CaasegError(
                f"{model} has {ours.num_classes} classes ({_some(ours.classes)}), but {models[0]} has "
                f"{first.num_classes} ({_some(first.classes)}); compare models with the same classes"
            )
    check_classes(first.num_classes, data)
    names = model_names(models, [network.config for network in networks])
    console = console_for(json)
    with progress_bars(console) as report:
        found = analysis.compare_models(
            networks, data, images=images, workers=workers, progress=lambda done: report("images", done, len(data))
        )
    save(draw_comparison(found, names, data.classes, data.palette), out)
    for line in comparison_lines(found, names):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if json is not None:
        described = {"dataset": dataset, "split": split}
        content = {**provenance(torch_device, COMMAND_LINE), **described, **comparison_as_json(found, names, models)}
        write_json(content, json, console)
    console.print(f"figure: {out}", soft_wrap=True, highlight=False)
    return 0


def _some(classes: tuple[str, ...] | None) -> str:
    if classes is None:
        return "without names"
    return ", ".join([*classes[:3], *(["..."] if len(classes) > 3 else [])])
