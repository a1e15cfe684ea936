"""`caaseg benchmark`: speed and memory of the attention, of models, on a CPU, of the loader and the evaluation."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from caaseg.cli.arguments import (
    Device,
    Figure,
    Names,
    Overrides,
    Positive,
    Scales,
    check_directory,
    check_writable,
    device_of,
)
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import Count, NotNegative, OutputStride, Size, Workers
from caaseg.errors import CaasegError

if TYPE_CHECKING:
    import torch

    from caaseg.benchmarks.attention import Measurement

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Mode = Literal["eager", "regional", "compiled"]
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


def benchmark_model(
    *,
    models: Names = ("caa", "caa:grouped", "axial", "danet", "torchvision:fcn", "torchvision:deeplabv3"),
    backbone: str = "resnet101",
    output_stride: OutputStride = 8,
    aux: bool = False,
    batch: Count = 16,
    sizes: Annotated[tuple[Size, ...], Field(min_length=1)] = ((513, 513),),
    num_classes: Count = 59,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    inference_only: bool = False,
    device: Device = "auto",
    seconds: NotNegative = 3.0,
    rounds: Count = 1,
    json: str | None = None,
    figure: Figure | None = None,
) -> int:
    """Measure images per second and peak memory of whole models, ours and others', in training and inference.

    A training step is forward, loss, backward and an SGD step, with autocast and channels_last. Our models train with
    fused_batch_norm, others with resized logits. For inference, batch normalizations of our models are folded.

    Args:
        models: our heads (caa, axial, danet, fcn, ...), file.py:Class for a head of your own, NAME:grouped for the
            paper's implementation, torchvision:fcn, torchvision:deeplabv3, smp:NAME for a model of
            segmentation_models_pytorch, or mmseg:NAME for a model of mmsegmentation. NAME:compiled compiles the model,
            NAME:regional compiles its blocks one by one, in less time. For our heads, NAME:captured replays the
            training step as a CUDA graph, and NAME:plain trains with torch's batch normalization.
        backbone: timm backbone of all models; torchvision's models support resnet50 and resnet101, mmsegmentation's
            also resnet50c and resnet101c.
        output_stride: output stride of all models; torchvision's models support only 8.
        aux: add the auxiliary classifier on the third stage, which mmsegmentation's models always have.
        batch: images per step.
        sizes: image sizes, such as 513 for 513 x 513, or 257x513; several show how the cost grows.
        num_classes: number of classes.
        dtype: dtype of autocast.
        inference_only: skip training.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        seconds: approximate time per measurement.
        rounds: number of measurements of each model; the fastest is reported, to reduce the effect of other load.
        json: file for the numbers; - is standard output.
        figure: file for the figure of time and memory against size (.png, .svg or .pdf).
    """
    from caaseg.benchmarks import model as model_benchmark
    from caaseg.benchmarks.provenance import provenance
    from caaseg.reports.figures import draw_growth, save
    from caaseg.reports.tables import model_table

    check_writable(json=json, figure=figure)
    torch_device, console = device_of(device), console_for(json)
    settings = [
        model_benchmark.Setting(
            backbone=backbone,
            output_stride=output_stride,
            batch=batch,
            size=size,
            num_classes=num_classes,
            dtype=dtype,
            aux=aux,
        )
        for size in sizes
    ]
    origin = provenance(torch_device, COMMAND_LINE)
    best: dict[tuple[model_benchmark.Setting, str], model_benchmark.ModelCost] = {}

    def content() -> dict[str, Any]:
        return {**origin, "setting": settings[0]._asdict(), "models": [cost._asdict() for cost in best.values()]}

    for setting, _, name in product(settings, range(rounds), models):
        if console.is_terminal:
            console.print(f"measuring {name}", highlight=False)
        cost = model_benchmark.measure_model(name, setting, torch_device, seconds=seconds, train=not inference_only)
        before = best.get((setting, name))
        best[setting, name] = cost if before is None else cost.or_faster(before)
        if json is not None and json != "-":  # keeps the finished measurements if a later model fails
            write_json(content(), json)
    costs = list(best.values())
    console.print(model_table(costs))
    if json is not None:
        write_json(content(), json, console)
    if figure is not None:
        save(draw_growth(costs, batch), figure)
        console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    return 0


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
    """Measure our heads beside those of mmsegmentation: images per second and memory, in training and inference.

    Both sides have the same settings, input, loss and training step. The exit code is 1 if a measurement failed; the
    others are measured nevertheless. The file of --json is written after each measurement.

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
        f"{found.images} images at {len(factors)} scales, flipped too: {found.ours_s:.3g} s, plain loop "
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


def benchmark_train(
    recipe: str,
    *,
    device: Device = "auto",
    seconds: NotNegative = 10.0,
    json: str | None = None,
    overrides: Overrides = (),
) -> int:
    """Measure the command caaseg train: images per second, time to the first step, and GPU utilization.

    The command runs in a process of its own, without validation, and is stopped after the measurement. The recipe's
    dataset folder without --data.root trains on synthetic images of 375 x 500 with 59 classes.

    Args:
        recipe: recipe (see caaseg recipes), or a YAML file.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        seconds: approximate time of the measurement, after the start of the command.
        json: file for the numbers; - is standard output.
        overrides: options of the recipe.
    """
    from contextlib import ExitStack
    from shutil import which
    from tempfile import TemporaryDirectory

    from caaseg.benchmarks.provenance import provenance
    from caaseg.benchmarks.training import measure_training, write_folder
    from caaseg.recipes import load_recipe

    check_writable(json=json)
    loaded, torch_device, console = load_recipe(recipe, overrides), device_of(device), console_for(json)
    arguments = [recipe, *overrides, "--device", str(torch_device)]
    gpu = None
    if torch_device.type == "cuda" and which("nvidia-smi"):
        import torch

        gpu = f"GPU-{torch.cuda.get_device_properties(torch_device).uuid}"
    with ExitStack() as stack:
        if loaded.data.dataset == "folder" and loaded.data.root is None:
            root = Path(stack.enter_context(TemporaryDirectory()))
            write_folder(root, number=64, size=(375, 500), num_classes=59)
            arguments += ["--data.root", str(root)]
        speed = measure_training(arguments, loaded.batch_size, seconds=seconds, gpu=gpu)
    busy = "" if speed.gpu_utilization is None else f", {speed.gpu_utilization:.1%} GPU utilization"
    console.print(
        f"{recipe}: {speed.images_per_second:.4g} images per second over {speed.steps} steps, {speed.waiting:.1%} of "
        f"the time waiting for data{busy}; first step within {speed.first_step_s:.1f} s of the command",
        soft_wrap=True,
    )
    if json is not None:
        content = {**provenance(torch_device, COMMAND_LINE), "recipe": loaded.as_dict(), **speed._asdict()}
        write_json(content, json, console)
    return 0


def benchmark_all(
    *,
    out: Path,
    camvid: Path | None = None,
    parts: Names | None = None,
    quick: bool = False,
) -> int:
    """Measure all speed and memory numbers of the project, one file per part, and compare them with their goals.

    A part that has finished is not repeated for the same commit and device: repeat the command to continue. A part that
    fails is named at the end, and the exit code is 1.

    Args:
        out: directory for the numbers, figures and logs.
        camvid: directory of CamVid, for the parts evaluation, train_camvid and loader.
        parts: names of parts; none runs all.
        quick: run all parts at tiny sizes on a CPU, to try them.
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from caaseg.benchmarks import all as benchmark
    from caaseg.benchmarks.loader import write_scenes
    from caaseg.benchmarks.provenance import provenance

    check_directory(out, "--out")
    known = {part.name: part for part in benchmark.PARTS}
    for name in parts or ():
        if name not in known:
            raise CaasegError(f"--parts has {name!r}; expected any of {', '.join(known)}")
    chosen = [part for part in benchmark.PARTS if parts is None or part.name in parts]
    device = device_of("cpu" if quick else "auto")
    if not quick:
        on_gpu = [part.name for part in chosen if part.device == "cuda"]
        if on_gpu and device.type != "cuda":
            raise CaasegError(
                f"the parts {', '.join(on_gpu)} need an NVIDIA GPU, but torch sees none; run them on a machine with "
                "a GPU, choose others with --parts, or try them at tiny sizes with --quick"
            )
        with_data = [part.name for part in chosen if part.needs_camvid]
        if with_data and camvid is None:
            raise CaasegError(f"the parts {', '.join(with_data)} need --camvid, the directory of CamVid")
        if with_data and camvid is not None and not camvid.is_dir():
            raise CaasegError(f"--camvid is '{camvid}': no such directory; expected the directory of CamVid")
    console = console_for(None)
    origin = provenance(device, COMMAND_LINE)
    hardware = f"{origin['hardware']['device']}, {origin['hardware']['processor']}"
    estimate = " and ".join(
        f"{sum(part.seconds for part in chosen if part.device == kind) / 60:.1f} minutes on the {title}"
        for kind, title in (("cuda", "GPU"), ("cpu", "CPU"))
    )
    planned = "at tiny sizes" if quick else f"about {estimate}"
    console.print(f"{len(chosen)} parts, {planned}; commit {origin['commit']}", soft_wrap=True)
    if not quick:
        console.print(", ".join(f"{part.name} {part.seconds} s" for part in chosen), soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    results = {
        one.name: one for one in benchmark.read_index(out) if (one.commit, one.device) == (origin["commit"], hardware)
    }
    with ExitStack() as stack:
        if quick and camvid is None:
            camvid = Path(stack.enter_context(TemporaryDirectory()))
            write_scenes(camvid, number=2)
        for result, is_before in benchmark.run_parts(
            chosen, out, commit=origin["commit"], device=hardware, camvid=camvid, quick=quick, run=benchmark.run_command
        ):
            results[result.name] = result
            state = f"failed with exit code {result.exit_code}" if result.exit_code else "finished"
            took = f"{state} {'before' if is_before else f'in {result.seconds:.0f} s'}"
            console.print(f"{result.name}: {took} (estimate {result.estimate_s} s)", soft_wrap=True)
            goals = benchmark.goals(out, [one.name for one in results.values() if one.exit_code == 0])
            content = {
                **origin,
                "parts": [one._asdict() for one in results.values()],
                "goals": [{**goal._asdict(), "is_met": goal.is_met} for goal in goals],
            }
            write_json(content, str(out / benchmark.INDEX))
    for goal in goals:
        if goal.value is not None and not quick:
            bound = f"at least {goal.at_least:g}" if goal.at_most is None else f"at most {goal.at_most:g}"
            console.print(f"{goal.name}: {goal.value:.3g}, goal {bound}, {'met' if goal.is_met else 'missed'}")
    failed = [part.name for part in chosen if results[part.name].exit_code]
    if failed:
        logs = ", ".join(str(out / f"{name}.log") for name in failed)
        console.print(f"failed: {', '.join(failed)}; see {logs}", style="bold red", soft_wrap=True)
    return 1 if failed else 0


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


def benchmark_cpu(
    *,
    root: Path,
    backbone: Literal["resnet50", "resnet101"] = "resnet50",
    size: Size = (512, 512),
    num_classes: Count = 59,
    rounds: Count = 10,
    json: str | None = None,
) -> int:
    """Measure inference of one image on a CPU: CAA and torchvision's FCN in float32, and CAA and camvid in INT8.

    Both models have random weights and run eagerly, compiled, and exported to ONNX; ours also with Winograd's algorithm
    and in INT8. The shipped model camvid is quantized too and scored on CamVid. All are measured in turn.

    Args:
        root: directory of CamVid, for calibration (split train) and mean IoU (split val) of the shipped model.
        backbone: backbone of both models with random weights; the output stride is 8.
        size: height and width of the image.
        num_classes: number of classes.
        rounds: number of turns of each model, of three calls each; the fastest call is reported.
        json: file for the numbers; - is standard output.
    """
    from importlib.metadata import version
    from tempfile import TemporaryDirectory

    from caaseg.benchmarks import cpu
    from caaseg.benchmarks.model import Setting
    from caaseg.benchmarks.provenance import provenance
    from caaseg.data.calibration import open_calibration
    from caaseg.data.catalogue import open_dataset
    from caaseg.models import load_model
    from caaseg.reports.tables import cpu_table

    check_writable([root], json=json)
    console = console_for(json)
    calibration, dataset = open_calibration(root, "camvid"), open_dataset("camvid", root, "val")
    setting = Setting(backbone, 8, 1, size, num_classes, "float32")
    with TemporaryDirectory() as temporary, progress_bars(console) as progress:
        directory = Path(temporary)
        timings = cpu.measure_in_turn(cpu.build_runs(setting, directory), rounds, progress)
        shipped = cpu.measure_int8(
            "camvid", load_model("camvid"), calibration, dataset, directory, rounds=rounds, progress=progress
        )
    console.print(cpu_table([*timings, *shipped.timings]))
    ratios, scores = cpu.ratios(timings), shipped.scores
    speedup = shipped.timings[0].seconds / shipped.timings[1].seconds
    for line in (
        f"caa is {ratios['caa_over_fcn']:.3g} times as fast as torchvision's fcn, each in its fastest float32 form "
        f"({ratios['caa_over_fcn_plain']:.3g} without Winograd's algorithm)",
        f"INT8 is {ratios['int8_over_onnx']:.3g} (caa) and {speedup:.3g} times (camvid) as fast as float32 ONNX",
        f"mean IoU of camvid: {100 * (scores.float32_mean_iou or 0):.2f} in float32, "
        f"{100 * (scores.int8_mean_iou or 0):.2f} in INT8",
    ):
        console.print(line, soft_wrap=True, highlight=False)
    if json is not None:
        origin = provenance(device_of("cpu"), COMMAND_LINE)
        origin["hardware"]["instructions"] = cpu.instructions()
        origin["versions"]["onnxruntime"] = version("onnxruntime")
        content = {
            "setting": setting._asdict(),
            "timings": [timing._asdict() for timing in timings],
            "ratios": ratios,
            "camvid": {
                "size": list(dataset[0].label.shape),
                "timings": [timing._asdict() for timing in shipped.timings],
                "int8_over_onnx": speedup,
                **scores._asdict(),
            },
        }
        write_json({**origin, **content}, json, console)
    return 0
