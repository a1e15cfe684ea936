"""`caaseg conflicts`: where a model's attentions fight."""

from pathlib import Path

from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.cli.words import Device, check_folder, check_writable, device_of


def conflicts(
    model: str,
    *,
    dataset: str,
    out: Path,
    root: Path | None = None,
    split: str = "val",
    images: int = 5,
    device: Device = "auto",
    workers: int = 2,
    json: str | None = None,
) -> int:
    """Show what a part of a model had right and the whole lost: image by image, class by class, on a page.

    Of danet, the parts are its spatial and its channel branch; of axial_se, the channel branch behind a stop-gradient.
    caa has no branches: shown is what changes when its gates are flattened to their means.

    Args:
        model: a run's folder, the folder of a saved model, or a hub id; of head danet, axial_se or caa.
        dataset: a name of caaseg data list.
        out: folder for conflicts.html, conflicts.png and, for caa, gates.png.
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        images: how many are drawn, from as many equal stretches of the split the worst of each.
        device: where to run; auto takes a GPU if there is one.
        workers: processes that read images while the model computes.
        json: file for the numbers, by class and of all images; - is standard output.
    """
    from caaseg.analysis.conflicts import check_head, study_conflicts
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import find, open_dataset
    from caaseg.evaluation.evaluate import check_classes
    from caaseg.models import load_model
    from caaseg.reports.conflicts import conflict_lines, conflict_table, conflicts_as_json, write_conflicts

    check_writable(json=json)
    check_folder(out, "--out")
    if images < 1:
        raise ValueError(f"--images is {images}; expected 1 or more")
    place = device_of(device)
    data = open_dataset(dataset, root, split)
    network = load_model(model).to(place)
    config = network.config
    check_head(network)
    check_classes(config.num_classes, data)
    console = console_for(json)
    with progress_bars(console) as report:
        found = study_conflicts(
            network, data, num_shown=images, workers=workers, progress=lambda done: report("images", done, len(data))
        )
    origin = provenance(place, COMMAND_LINE)
    on = f"{find(dataset).title} ({dataset}, {len(data.classes)} classes), {split}: {len(data)} images"
    title = f"Conflicts in {config.head} on {config.backbone}, {dataset}"
    written = write_conflicts(out, found, head=network.head, title=title, data=on, palette=data.palette, origin=origin)
    wording = network.head.conflict_wording
    assert wording is not None
    console.print(conflict_table(found))
    for line in (on, *conflict_lines(found, wording), wording.caution):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if json is not None:
        described = {"model": model, "head": config.head, "dataset": dataset, "split": split}
        described |= {"lost": wording.lost, "won": wording.won}
        write_json({**origin, **described, **conflicts_as_json(found)}, json, console)
    for path in written:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return 0
