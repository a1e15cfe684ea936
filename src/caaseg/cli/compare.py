"""`caaseg compare`: models side by side."""

from pathlib import Path

from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.cli.words import Device, check_figure, check_writable, device_of


def compare_models(
    models: list[str],
    *,
    dataset: str,
    out: Path,
    root: Path | None = None,
    split: str = "val",
    images: int = 4,
    device: Device = "auto",
    workers: int = 2,
    json: str | None = None,
) -> int:
    """Draw image, truth and what each of several models says side by side, where they differ most in boxes.

    The images are those on which the models differ on the largest share of the labelled pixels, each from its own
    stretch of the split: neighbours, as of one film, are much alike.

    Args:
        models: two or more of the same classes; each a run's folder, the folder of a saved model, or a hub id.
        dataset: a name of caaseg data list.
        out: file for the figure (.png, .svg or .pdf).
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        images: how many are drawn, from as many equal stretches of the split.
        device: where to run; auto takes a GPU if there is one.
        workers: processes that read images while the models compute.
        json: file for the numbers of all images; - is standard output.
    """
    from caaseg.analysis import compare as analysis
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import open_dataset
    from caaseg.evaluation.evaluate import check_classes
    from caaseg.models import load_model
    from caaseg.reports.compare import comparison_as_json, comparison_lines, draw_comparison, model_names
    from caaseg.reports.figures import save

    check_figure(out, "--out")
    check_writable(json=json, out=out)
    if len(models) < 2:
        raise ValueError(f"{models[0]} is the only model; expected two or more to compare")
    if images < 1:
        raise ValueError(f"--images is {images}; expected 1 or more")
    place = device_of(device)
    data = open_dataset(dataset, root, split)
    networks = [load_model(model).to(place) for model in models]
    first = networks[0].config
    for model, network in zip(models, networks, strict=True):
        ours = network.config
        if ours.num_classes != first.num_classes or (ours.classes and first.classes and ours.classes != first.classes):
            raise ValueError(
                f"{model} tells {ours.num_classes} classes apart ({_some(ours.classes)}), but {models[0]} "
                f"{first.num_classes} ({_some(first.classes)}); compare models of the same classes"
            )
    check_classes(first.num_classes, data)
    names = model_names(models, [network.config for network in networks])
    console = console_for(json)
    with progress_bars(console) as report:
        found = analysis.compare_models(
            networks, data, num_shown=images, workers=workers, progress=lambda done: report("images", done, len(data))
        )
    save(draw_comparison(found, names, data.classes, data.palette), out)
    for line in comparison_lines(found, names):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if json is not None:
        described = {"dataset": dataset, "split": split}
        content = {**provenance(place, COMMAND_LINE), **described, **comparison_as_json(found, names, models)}
        write_json(content, json, console)
    console.print(f"figure: {out}", soft_wrap=True, highlight=False)
    return 0


def _some(classes: tuple[str, ...] | None) -> str:
    if classes is None:
        return "without names"
    return ", ".join([*classes[:3], *(["..."] if len(classes) > 3 else [])])
