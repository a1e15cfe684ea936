"""`caaseg benchmark attention`: time and memory of the attention implementations, and their agreement."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from caaseg.cli.arguments import Device, Figure, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import Count, NotNegative

if TYPE_CHECKING:
    import torch

    from caaseg.benchmarks.attention import Measurement

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Contender = Literal["axial", "fused", "factorised", "grouped", "loop"]
GPU_SHAPES = ((16, 33, 33), (16, 65, 65), (8, 97, 97), (1, 129, 257), (1, 129, 513))
CPU_SHAPES = ((1, 17, 17), (1, 33, 33))


def _split_shape(value: Any) -> Any:
    """Return [16, 65, 65] for "16x65x65"."""
    if isinstance(value, str):
        return [int(part) if part.isdecimal() else part for part in value.lower().split("x")]
    return value


Shape = Annotated[tuple[Count, Count, Count], BeforeValidator(_split_shape)]


def benchmark_attention(
    *,
    sizes: Annotated[tuple[Shape, ...], Field(min_length=1)] | None = None,
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)] | None = None,
    implementations: Annotated[tuple[Contender, ...], Field(min_length=1)] | None = None,
    groups: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16, 32),
    channels: Count = 512,
    key_channels: Count = 64,
    device: Device = "auto",
    seconds: NotNegative = 0.5,
    json: str | None = None,
    figure: Figure | None = None,
) -> int:
    """Measure time and peak memory of the implementations of channelized axial attention, and check that they agree.

    Each case is computed forward and forward+backward and compared with float64. The exit code is 1 if one disagrees.

    Args:
        sizes: batch x height x width, such as 16x65x65; by default 16x33x33 16x65x65 8x97x97 1x129x257 1x129x513 on
            a GPU and 1x17x17 1x33x33 on a CPU.
        dtypes: by default float32 and bfloat16 on a GPU and float32 on a CPU.
        implementations: axial is without gates; by default all on a GPU, and all but fused on a CPU.
        groups: numbers of groups for grouped; numbers above the length of an axis are skipped.
        channels: value channels.
        key_channels: query and key channels.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        seconds: approximate time per measurement.
        json: file for the numbers; - is standard output.
        figure: file for the figure of time and memory against the number of groups (.png, .svg or .pdf).
    """
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from caaseg.benchmarks import attention as benchmark
    from caaseg.models.inference import check_implementation_runs

    torch_device = device_of(device)
    on_gpu = torch_device.type == "cuda"
    check_writable(json=json, figure=figure)
    for implementation in implementations or ():
        check_implementation_runs(implementation, torch_device)
    combinations = benchmark.cases(
        sizes or (GPU_SHAPES if on_gpu else CPU_SHAPES),
        dtypes or (("float32", "bfloat16") if on_gpu else ("float32",)),
        implementations or tuple(one for one in get_args(Contender) if on_gpu or one != "fused"),
        groups,
        channels=channels,
        key_channels=key_channels,
    )
    console = console_for(json)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=len(combinations))
        outcomes = []
        for outcome in benchmark.run(combinations, torch_device, seconds=seconds):
            outcomes.append(outcome)
            bar.advance(task)
    return report_attention(outcomes, torch_device, json=json, figure=figure)


def report_attention(
    outcomes: "Sequence[Measurement]", device: "torch.device", *, json: str | None = None, figure: Path | None = None
) -> int:
    """Print and write the measurements of `caaseg benchmark attention`; return 1 if an implementation disagrees."""
    from caaseg.benchmarks import attention as benchmark
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.figures import draw_groups, save
    from caaseg.reports.tables import attention_tables, ratio_lines

    console = console_for(json)
    for table in attention_tables(outcomes):
        console.print(table)
    ratios = benchmark.ratios(outcomes)
    for line in ratio_lines(ratios):
        console.print(line, highlight=False)
    if json is not None:
        measurements = [benchmark.as_json(outcome) for outcome in outcomes]
        origin = provenance(device, COMMAND_LINE)
        write_json({**origin, "measurements": measurements, "ratios": ratios}, json, console)
    if figure is not None:
        save(draw_groups(outcomes), figure)
        console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    disagreeing = [outcome.case.label for outcome in outcomes if not outcome.agrees]
    if disagreeing:
        console.print(f"these disagree with float64 by more than rounding: {', '.join(disagreeing)}", style="bold red")
    return 1 if disagreeing else 0
