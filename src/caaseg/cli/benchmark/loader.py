"""`caaseg benchmark loader`: the training loader compared with torchvision's reference pipeline."""

from pathlib import Path
from typing import get_args

from caaseg.cli.arguments import check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import Count, Size


def benchmark_loader(
    *,
    root: Path | None = None,
    crop: Size = (352, 480),
    batch_size: Count = 16,
    rounds: Count = 9,
    steps: Count = 12,
    json: str | None = None,
) -> int:
    """Measure images per second of the training loader and of torchvision's reference pipeline, on one core.

    Args:
        root: directory of CamVid; by default, synthetic scenes of the same size are written to a temporary directory.
        crop: height and width of the samples.
        batch_size: samples per batch.
        rounds: number of measurements of each pipeline; the median is reported.
        steps: batches per measurement.
        json: file for the numbers; - is standard output.
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from caaseg.benchmarks import loader as benchmark
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.tables import loader_table

    check_writable(json=json)
    console = console_for(json)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        if root is None:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            benchmark.write_scenes(directory, number=64)
        else:
            directory = root
        workload = benchmark.Workload(root=directory, crop=crop, batch_size=batch_size, steps=steps)
        bar = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal, transient=True))
        task = bar.add_task("measuring", total=rounds * len(get_args(benchmark.Pipeline)))
        speeds = benchmark.run(workload, rounds, progress=lambda: bar.advance(task))
        content = benchmark.as_json(workload, speeds)
    console.print(loader_table(speeds))
    console.print(f"caaseg is {benchmark.speedup(speeds):.3g} times as fast as the faster reference", highlight=False)
    if json is not None:
        with benchmark.one_core():  # as measured
            origin = provenance(device_of("cpu"), COMMAND_LINE)
        data = "synthetic scenes" if root is None else "CamVid, train"
        write_json({**origin, "data": data, **content}, json, console)
    return 0
