"""`caaseg conflicts`: pixels that one attention branch classifies correctly and the whole model does not."""

from pathlib import Path

from caaseg.cli.arguments import Device, check_directory, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import Count, Workers


def conflicts(
    model: str,
    *,
    dataset: str,
    out: Path,
    root: Path | None = None,
    split: str = "val",
    images: Count = 5,
    device: Device = "auto",
    workers: Workers = 2,
    json: str | None = None,
) -> int:
    """Report pixels that one attention branch classifies correctly and the whole model does not, per image and class.

    For danet, the branches are spatial and channel; for axial_se, the channel branch behind a stop-gradient. caa has no
    branches: its report shows the effect of replacing the gates by their means.

    Args:
        model: a run, a model directory or hf://owner/name, with head danet, axial_se or caa.
        dataset: dataset name (see caaseg data list).
        out: directory for conflicts.html, conflicts.png and, for caa, gates.png.
        root: directory of the dataset; scenes need none.
        split: train, val or test.
        images: number of images to draw; the split is divided into as many parts, and the worst image of each is drawn.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        workers: data loading processes.
        json: file for the numbers per class and per image; - is standard output.
    """
    from caaseg.analysis.conflicts import check_head, study_conflicts
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import find, open_dataset
    from caaseg.evaluation.evaluate import check_classes
    from caaseg.models import load_model
    from caaseg.reports.conflicts import conflict_lines, conflict_table, conflicts_as_json, write_conflicts

    check_writable([model, root], json=json)
    check_directory(out, "--out")
    torch_device = device_of(device)
    data = open_dataset(dataset, root, split)
    network = load_model(model).to(torch_device)
    config = network.config
    check_head(network)
    check_classes(config.num_classes, data)
    console = console_for(json)
    with progress_bars(console) as report:
        found = study_conflicts(
            network, data, num_shown=images, workers=workers, progress=lambda done: report("images", done, len(data))
        )
    origin = provenance(torch_device, COMMAND_LINE)
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
