"""`caaseg benchmark evaluation`: multi-scale evaluation compared with a plain loop."""

from pathlib import Path
from typing import Literal

from caaseg.cli.arguments import Device, Scales, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import Count, Workers


def benchmark_evaluation(
    model: str,
    *,
    dataset: str,
    root: Path | None = None,
    split: str = "test",
    scales: Scales = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
    batch_size: Count = 8,
    images: Count | None = None,
    precision: Literal["32", "bf16"] = "bf16",
    device: Device = "auto",
    workers: Workers = 4,
    json: str | None = None,
) -> int:
    """Compare the time of a multi-scale evaluation with a plain loop over images, scales and flips.

    Args:
        model: a run, a model directory or hf://owner/name.
        dataset: dataset name (see caaseg data list).
        root: directory of the dataset; scenes need none.
        split: train, val or test.
        scales: image scales.
        batch_size: images per batch, which must have the same size.
        images: number of images from the start of the split; none uses all.
        precision: precision of the model.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        workers: data loading processes.
        json: file for the numbers; - is standard output.
    """
    from caaseg.benchmarks.evaluation import measure_evaluation
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import open_dataset
    from caaseg.models import load_model

    check_writable(json=json)
    factors = list(scales)
    torch_device, console = device_of(device), console_for(json)
    network, data = load_model(model).to(torch_device), open_dataset(dataset, root, split)
    found = measure_evaluation(
        network, data, factors, batch_size=batch_size, images=images, precision=precision, workers=workers
    )
    console.print(
        f"{found.images} images at {len(factors)} scales with flips: {found.ours_s:.3g} s; the plain loop takes "
        f"{found.plain_s:.3g} s, {found.plain_s / found.ours_s:.3g} times as long; "
        f"they agree on {100 * found.agreement:.3f}% of the pixels",
        soft_wrap=True,
        highlight=False,
    )
    if json is not None:
        described = {"model": model, "dataset": dataset, "split": split, "scales": factors, "batch_size": batch_size}
        speedup = {"speedup": found.plain_s / found.ours_s, "precision": precision, "workers": workers}
        write_json({**provenance(torch_device, COMMAND_LINE), **described, **found._asdict(), **speedup}, json, console)
    return 0
