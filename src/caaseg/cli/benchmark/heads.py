"""`caaseg benchmark heads`: our heads compared with those of mmsegmentation."""

from typing import Annotated, Literal

from pydantic import Field

from caaseg.cli.arguments import Device, Names, Positive, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import Count, NotNegative, Size

Mode = Literal["eager", "regional", "compiled"]


def benchmark_heads(
    *,
    heads: Names | None = None,
    modes: Annotated[tuple[Mode, ...], Field(min_length=1)] = ("eager", "regional"),
    backbone: str = "resnet101c",
    batch: Count = 16,
    size: Size = (513, 513),
    num_classes: Count = 59,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: Device = "auto",
    seconds: NotNegative = 0.5,
    limit_minutes: Positive | None = None,
    json: str | None = None,
) -> int:
    """Compare our heads with those of mmsegmentation: images per second and memory, in training and inference.

    Both sides have the same settings, input, loss and training step. If a measurement fails, the others continue, and
    the exit code is 1. The file of --json is written after each measurement.

    Args:
        heads: heads to measure; by default all that mmsegmentation has too.
        modes: eager; regional, which compiles residual blocks and other parts of a model one by one; compiled, which
            compiles whole models and takes minutes for each. All heads are measured in one mode before the next.
        backbone: backbone of both sides; resnet101c is the ResNet of mmsegmentation's published models.
        batch: images per step.
        size: image size, such as 513 for 513 x 513.
        num_classes: number of classes.
        dtype: dtype of autocast.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        seconds: approximate time per measurement; there are two per model.
        limit_minutes: start no head after this time.
        json: file for the numbers; - is standard output.
    """
    from caaseg.benchmarks import heads as benchmark
    from caaseg.benchmarks.model import Setting
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.tables import head_cost_tables

    check_writable(json=json)
    torch_device, console = device_of(device), console_for(json)
    setting = Setting(
        backbone=backbone, output_stride=8, batch=batch, size=size, num_classes=num_classes, dtype=dtype, aux=True
    )
    origin = provenance(torch_device, COMMAND_LINE)
    shared = {name: getattr(setting, name) for name in ("backbone", "batch", "size", "num_classes", "dtype")}
    costs = benchmark.HeadCosts({}, {}, [])
    for part, costs in benchmark.measure_heads(
        heads or benchmark.COMPARED,
        modes,
        setting,
        torch_device,
        seconds=seconds,
        limit_s=None if limit_minutes is None else 60 * limit_minutes,
    ):
        console.print(f"{part.model}: {costs.failed.get(part, 'measured')}", soft_wrap=True, highlight=False)
        if json is not None and json != "-":  # keeps the finished measurements if the command is killed
            write_json({**origin, "setting": shared, **benchmark.as_json(costs)}, json)
    for table in head_cost_tables(costs):
        console.print(table)
    for title, parts in (("failed", costs.failed), ("not started", costs.left)):
        if parts:
            console.print(f"{title}: {', '.join(part.model for part in parts)}", highlight=False)
    if json is not None:
        write_json({**origin, "setting": shared, **benchmark.as_json(costs)}, json, console)
    return 1 if costs.failed else 0
