"""`caaseg benchmark` and `caaseg flops`: what the attention, models and loaders cost."""

from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.cli.words import (
    Device,
    area_of,
    check_figure,
    check_writable,
    chosen_of,
    device_of,
    factor_of,
    whole_number,
    words_of,
)

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


def benchmark_attention(
    sizes: str = "auto",
    dtypes: str = "auto",
    implementations: str = "auto",
    groups: str = "1,2,4,8,16,32",
    channels: int = 512,
    key_channels: int = 64,
    device: Device = "auto",
    seconds: float = 0.5,
    json: str | None = None,
    figure: Path | None = None,
) -> int:
    """Time and peak memory of channelized axial attention, implementation beside implementation, checked to agree.

    Each case is computed forward and forward+backward and held against float64. Exit code 1 if one disagrees.

    Args:
        sizes: batch x height x width, comma-separated; auto is 16x33x33,16x65x65,8x97x97,1x129x257 on a GPU and
            1x17x17,1x33x33 on a CPU.
        dtypes: float64, float32, bfloat16 or float16, comma-separated; auto is float32,bfloat16 on a GPU and float32
            on a CPU.
        implementations: axial (no gates), fused, factorised, grouped or loop, comma-separated; auto is all of them on a
            GPU, and all but fused on a CPU.
        groups: numbers of groups for grouped, comma-separated; those longer than an axis are left out.
        channels: value channels.
        key_channels: query and key channels.
        device: where to run; auto takes a GPU if there is one.
        seconds: about how long to repeat each measurement.
        json: file for the numbers; - is standard output.
        figure: file for the figure of time and memory against number of groups (.png, .svg or .pdf).
    """
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from caaseg.benchmarks import attention as benchmark
    from caaseg.benchmarks.provenance import provenance

    place = device_of(device)
    on_gpu = place.type == "cuda"
    if sizes == "auto":
        sizes = "16x33x33,16x65x65,8x97x97,1x129x257" if on_gpu else "1x17x17,1x33x33"
    if implementations == "auto":
        implementations = "axial,fused,factorised,grouped,loop" if on_gpu else "axial,factorised,grouped,loop"
    if dtypes == "auto":
        dtypes = "float32,bfloat16" if on_gpu else "float32"
    for name, number in (("--channels", channels), ("--key-channels", key_channels)):
        if number < 1:
            raise ValueError(f"{name} is {number}; expected 1 or more")
    if seconds < 0:
        raise ValueError(f"--seconds is {seconds}; expected 0 or more")
    check_writable(json=json, figure=figure)
    if figure is not None:
        check_figure(figure, "--figure")
    combinations = benchmark.cases(
        [_size(word) for word in words_of(sizes, "--sizes")],
        chosen_of(dtypes, get_args(Dtype), "--dtypes"),
        chosen_of(implementations, get_args(benchmark.Implementation), "--implementations"),
        [whole_number(word, "--groups") for word in words_of(groups, "--groups")],
        channels=channels,
        key_channels=key_channels,
    )
    console = console_for(json)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=len(combinations))
        outcomes = []
        for outcome in benchmark.run(combinations, place, seconds=seconds):
            outcomes.append(outcome)
            bar.advance(task)

    from caaseg.reports.figures import draw_groups, save
    from caaseg.reports.tables import attention_tables, ratio_lines

    for table in attention_tables(outcomes):
        console.print(table)
    ratios = benchmark.ratios(outcomes)
    for line in ratio_lines(ratios):
        console.print(line, highlight=False)
    if json is not None:
        measurements = [benchmark.as_json(outcome) for outcome in outcomes]
        origin = provenance(place, COMMAND_LINE)
        write_json({**origin, "measurements": measurements, "ratios": ratios}, json, console)
    if figure is not None:
        save(draw_groups(outcomes), figure)
        console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    disagreeing = [outcome.case.label for outcome in outcomes if not outcome.agrees]
    if disagreeing:
        console.print(f"these disagree with float64 by more than rounding: {', '.join(disagreeing)}", style="bold red")
    return 1 if disagreeing else 0


def _size(word: str) -> tuple[int, int, int]:
    parts = word.lower().split("x")
    if len(parts) != 3:
        raise ValueError(f"--sizes has {word!r}; expected batch x height x width, such as 16x65x65")
    batch, height, width = (whole_number(part, "--sizes") for part in parts)
    return batch, height, width


def benchmark_model(
    models: str = "caa,caa:grouped,axial,danet,torchvision:fcn,torchvision:deeplabv3",
    backbone: str = "resnet101",
    output_stride: Literal[8] = 8,
    batch: int = 16,
    size: str = "513x513",
    num_classes: int = 59,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    inference_only: bool = False,
    device: Device = "auto",
    seconds: float = 3.0,
    rounds: int = 1,
    json: str | None = None,
    figure: Path | None = None,
) -> int:
    """Images a second and peak memory of whole models, ours beside torchvision's, in training and in inference.

    A training step is forward, loss, backward and an SGD step, under autocast, in channels-last layout. Each is trained
    as its makers have it: ours with fused_batch_norm, torchvision's from resized logits. For inference ours folds.

    Args:
        models: heads of ours (caa, axial, danet, fcn, ...), name:grouped for the paper's implementation,
            torchvision:fcn or torchvision:deeplabv3, smp:NAME for one of segmentation_models_pytorch where that is
            installed; :compiled behind a name compiles it first; :captured behind one of ours replays its training step
            as recipes with cuda_graph do, :plain trains it with torch's own normalization; comma-separated.
        backbone: of all of them, a name of timm; torchvision's have resnet50 and resnet101.
        output_stride: of all of them; torchvision's are built for 8.
        batch: images a step.
        size: height x width of the images; one number is both; several, comma-separated, show how cost grows.
        num_classes: number of classes.
        dtype: what autocast computes in.
        inference_only: leave training out.
        device: where to run; auto takes a GPU if there is one.
        seconds: about how long to repeat each measurement.
        rounds: measure all models so often, one after the other, and keep the fastest of each: what else a machine does
            then counts less.
        json: file for the numbers; - is standard output.
        figure: file for the figure of time and memory against size (.png, .svg or .pdf).
    """
    from caaseg.benchmarks import model as model_benchmark
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.figures import draw_growth, save
    from caaseg.reports.tables import model_table

    if batch < 1:
        raise ValueError(f"--batch is {batch}; expected 1 or more")
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; expected 1 or more")
    check_writable(json=json, figure=figure)
    if figure is not None:
        check_figure(figure, "--figure")
    place, console = device_of(device), console_for(json)
    sizes = [area_of(word, "--size") for word in words_of(size, "--size")]
    settings = [
        model_benchmark.Setting(
            backbone=backbone,
            output_stride=output_stride,
            batch=batch,
            size=area,
            num_classes=num_classes,
            dtype=dtype,
        )
        for area in sizes
    ]
    origin = provenance(place, COMMAND_LINE)
    best: dict[tuple[model_benchmark.Setting, str], model_benchmark.ModelCost] = {}

    def content() -> dict[str, Any]:
        return {**origin, "setting": settings[0]._asdict(), "models": [cost._asdict() for cost in best.values()]}

    for setting, _, name in product(settings, range(rounds), words_of(models, "--models")):
        if console.is_terminal:
            console.print(f"measuring {name}", highlight=False)
        cost = model_benchmark.measure_model(name, setting, place, seconds=seconds, train=not inference_only)
        before = best.get((setting, name))
        best[setting, name] = cost if before is None else cost.or_faster(before)
        if json is not None and json != "-":  # what is measured is kept, should the rest not come to its end
            write_json(content(), json)
    costs = list(best.values())
    console.print(model_table(costs))
    if json is not None:
        write_json(content(), json, console)
    if figure is not None:
        save(draw_growth(costs, batch), figure)
        console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    return 0


def benchmark_evaluation(
    model: str,
    *,
    dataset: str,
    root: Path | None = None,
    split: str = "test",
    scales: str = "0.5,0.75,1.0,1.25,1.5,1.75",
    batch_size: int = 8,
    images: int | None = None,
    precision: Literal["32", "bf16"] = "bf16",
    device: Device = "auto",
    workers: int = 4,
    json: str | None = None,
) -> int:
    """Seconds to score a model at several scales and mirrored, beside a plain loop over images, scales and mirrors.

    Args:
        model: a run's folder, the folder of a saved model, or a hub id.
        dataset: a name of caaseg data list.
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        scales: factors of the images' size, comma-separated.
        batch_size: images that ours takes at once; they must be of one size.
        images: how many of the split, from its start; none takes all.
        precision: what the network computes in: 32, or bf16 by autocast.
        device: where to run; auto takes a GPU if there is one.
        workers: processes that read beside this one.
        json: file for the numbers; - is standard output.
    """
    from caaseg.benchmarks.evaluation import measure_evaluation
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.catalogue import open_dataset
    from caaseg.models import load_model

    check_writable(json=json)
    factors = [factor_of(word, "--scales") for word in words_of(scales, "--scales")]
    place, console = device_of(device), console_for(json)
    network, data = load_model(model).to(place), open_dataset(dataset, root, split)
    found = measure_evaluation(
        network, data, factors, batch_size=batch_size, images=images, precision=precision, workers=workers
    )
    console.print(
        f"{found.images} images at {len(factors)} scales, mirrored too: {found.ours_s:.3g} s, plain loop "
        f"{found.plain_s:.3g} s, {found.plain_s / found.ours_s:.3g} times as long; "
        f"they agree on {100 * found.agreement:.3f}% of the pixels",
        soft_wrap=True,
        highlight=False,
    )
    if json is not None:
        described = {"model": model, "dataset": dataset, "split": split, "scales": factors, "batch_size": batch_size}
        speedup = {"speedup": found.plain_s / found.ours_s, "precision": precision, "workers": workers}
        write_json({**provenance(place, COMMAND_LINE), **described, **found._asdict(), **speedup}, json, console)
    return 0


def benchmark_loader(
    root: Path | None = None,
    crop: str = "352x480",
    batch_size: int = 16,
    rounds: int = 9,
    steps: int = 12,
    json: str | None = None,
) -> int:
    """Images a second of the training loader beside torchvision's reference pipeline, on the same files and one core.

    Args:
        root: folder of CamVid; without it, drawn scenes are written to a temporary folder in its size and layout.
        crop: height x width of the samples.
        batch_size: samples in a batch.
        rounds: how often each pipeline has its turn; the median counts.
        steps: batches in a turn.
        json: file for the numbers; - is standard output.
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from caaseg.benchmarks import loader as benchmark
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.tables import loader_table

    check_writable(json=json)
    for name, number in (("--batch-size", batch_size), ("--rounds", rounds), ("--steps", steps)):
        if number < 1:
            raise ValueError(f"{name} is {number}; expected 1 or more")
    crop_size = area_of(crop, "--crop")
    console = console_for(json)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        if root is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            benchmark.write_scenes(folder, number=64)
        else:
            folder = root
        workload = benchmark.Workload(root=folder, crop=crop_size, batch_size=batch_size, steps=steps)
        bar = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal, transient=True))
        task = bar.add_task("measuring", total=rounds * len(get_args(benchmark.Pipeline)))
        speeds = benchmark.run(workload, rounds, progress=lambda: bar.advance(task))
        content = benchmark.as_json(workload, speeds)
    console.print(loader_table(speeds))
    console.print(f"caaseg is {benchmark.speedup(speeds):.3g} times as fast as the faster reference", highlight=False)
    if json is not None:
        with benchmark.one_core():  # as measured
            origin = provenance(device_of("cpu"), COMMAND_LINE)
        data = "scenes, drawn" if root is None else "CamVid, train"
        write_json({**origin, "data": data, **content}, json, console)
    return 0


def flops(
    head: str = "caa",
    backbone: str = "resnet101",
    output_stride: Literal[8, 16] = 16,
    size: str = "513x513",
    num_classes: int = 59,
    aux: bool = False,
    decoder: bool = False,
    resnet_variant: Literal["standard", "authors"] = "standard",
    gate_layers: int = 5,
    gate_width: int = 128,
    paper: bool = False,
    json: str | None = None,
) -> int:
    """Multiply-adds and parameters of a model for one image, counted in seconds without making its weights.

    Args:
        head: fcn, axial, axial_se, caa, self_attention, channelized_self_attention or danet.
        backbone: a timm model that supports features_only and output_stride.
        output_stride: how many pixels a feature of the head stands for.
        size: height x width of the image; one number is both.
        num_classes: number of classes.
        aux: count the auxiliary branch too.
        decoder: count the simple decoder on stride-4 features too.
        resnet_variant: the standard ResNet, or the authors' (deep stem, strides in the last blocks).
        gate_layers: hidden layers of a channel gate.
        gate_width: units of a hidden layer of a channel gate.
        paper: print the FLOPs columns of the paper's Tables 1 and 4 beside ours instead.
        json: file for the numbers; - is standard output.
    """
    from caaseg.analysis import flops as counting
    from caaseg.models import ModelConfig
    from caaseg.reports.tables import flops_table, paper_table

    check_writable(json=json)
    console = console_for(json)
    if paper:
        rows = counting.paper_rows()
        console.print(paper_table(rows))
        console.print(f"Ours: {counting.CONVENTION}.", highlight=False)
        if json is not None:
            records = [row._asdict() for row in rows]
            write_json({"convention": counting.CONVENTION, "size": [513, 513], "rows": records}, json, console)
        return 0
    height, width = area_of(size, "--size")
    config = ModelConfig(
        head=head,
        backbone=backbone,
        num_classes=num_classes,
        output_stride=output_stride,
        aux=aux,
        decoder=decoder,
        resnet_variant=resnet_variant,
        gate_layers=gate_layers,
        gate_width=gate_width,
    )
    counted = counting.count(config, (height, width))
    console.print(f"{head} on {backbone}, stride {output_stride}, {height} x {width}", highlight=False)
    console.print(flops_table(counted))
    console.print(f"Convention: {counting.CONVENTION}.", highlight=False)
    if json is not None:
        content = {
            "head_name": head,
            "backbone_name": backbone,
            "output_stride": output_stride,
            "size": [height, width],
            "backbone": counted.backbone,
            "head": counted.head,
            "gates": counted.gates,
            "total": counted.total,
            "parameters": counted.parameters,
            "convention": counting.CONVENTION,
        }
        write_json(content, json, console)
    return 0
