"""The command `caaseg`: one typed function a command. Heavy imports wait inside them, so that help is instant."""

import json as json_format
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jsonargparse import ArgumentParser, Namespace

from caaseg import __version__
from caaseg.config import OutputStride
from caaseg.recipe_files import add_recipe_arguments, split_overrides

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from caaseg.data.sample import Batch
    from caaseg.training.runs import Progress

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]

Command = Callable[..., int]

ARGUMENTS: list[str] = []
"""The words of the command that runs, for the records of what was measured how."""


def demo(out: Path = Path("caaseg-demo")) -> int:
    """See what the factorisation does: a small comparison with the paper's own way, its table and its figure.

    Args:
        out: folder for the figure and the numbers.
    """
    return benchmark_attention(
        sizes="1x17x17,1x33x33",
        dtypes="float32",
        groups="1,2,4,8,16,33",
        channels=128,
        device="cpu",
        seconds=0.2,
        json=str(out / "attention.json"),
        figure=out / "attention.png",
    )


def benchmark_attention(
    sizes: str = "auto",
    dtypes: str = "auto",
    implementations: str = "axial,factorised,grouped,loop",
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
        implementations: axial (no gates), factorised, grouped or loop, comma-separated.
        groups: numbers of groups for grouped, comma-separated; those longer than an axis are left out.
        channels: value channels.
        key_channels: query and key channels.
        device: where to run; auto takes a GPU if there is one.
        seconds: about how long to repeat each measurement.
        json: file for the numbers; - is standard output.
        figure: file for the figure of time and memory against number of groups (.png, .svg or .pdf).
    """
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from caaseg.evaluation import benchmark
    from caaseg.evaluation.measure import provenance

    place = _device(device)
    on_gpu = place.type == "cuda"
    if sizes == "auto":
        sizes = "16x33x33,16x65x65,8x97x97,1x129x257" if on_gpu else "1x17x17,1x33x33"
    if dtypes == "auto":
        dtypes = "float32,bfloat16" if on_gpu else "float32"
    for name, number in (("--channels", channels), ("--key-channels", key_channels)):
        if number < 1:
            raise ValueError(f"{name} is {number}; expected 1 or more")
    if seconds < 0:
        raise ValueError(f"--seconds is {seconds}; expected 0 or more")
    _check_writable(json=json, figure=figure)
    if figure is not None:
        _check_figure(figure, "--figure")
    combinations = benchmark.cases(
        [_size(word) for word in _words(sizes, "--sizes")],
        _chosen(dtypes, get_args(Dtype), "--dtypes"),
        _chosen(implementations, get_args(benchmark.Contender), "--implementations"),
        [_whole(word, "--groups") for word in _words(groups, "--groups")],
        channels=channels,
        key_channels=key_channels,
    )
    console = _console(json)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=len(combinations))
        outcomes = []
        for outcome in benchmark.run(combinations, place, seconds=seconds):
            outcomes.append(outcome)
            bar.advance(task)

    from caaseg.reports.draw import draw_groups, save
    from caaseg.reports.tables import attention_tables, ratio_lines

    for table in attention_tables(outcomes):
        console.print(table)
    ratios = benchmark.ratios(outcomes)
    for line in ratio_lines(ratios):
        console.print(line, highlight=False)
    if json is not None:
        measurements = [benchmark.as_json(outcome) for outcome in outcomes]
        origin = provenance(place, ARGUMENTS)
        _write_json({**origin, "measurements": measurements, "ratios": ratios}, json, console)
    if figure is not None:
        save(draw_groups(outcomes), figure)
        console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    disagreeing = [outcome.case.label for outcome in outcomes if not outcome.agrees]
    if disagreeing:
        console.print(f"these disagree with float64 by more than rounding: {', '.join(disagreeing)}", style="bold red")
    return 1 if disagreeing else 0


def benchmark_model(
    models: str = "caa,caa:grouped,axial,danet,torchvision:fcn,torchvision:deeplabv3",
    backbone: Literal["resnet50", "resnet101"] = "resnet101",
    output_stride: Literal[8] = 8,
    batch: int = 16,
    size: str = "513x513",
    num_classes: int = 59,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: Device = "auto",
    seconds: float = 3.0,
    json: str | None = None,
) -> int:
    """Images a second and peak memory of whole models, ours beside torchvision's, in training and in inference.

    A training step is forward, loss, backward and an SGD step, under autocast, in channels-last layout.

    Args:
        models: heads of ours (caa, axial, danet, fcn, ...), name:grouped for the paper's implementation,
            torchvision:fcn or torchvision:deeplabv3; comma-separated.
        backbone: of all of them.
        output_stride: of all of them; torchvision's are built for 8.
        batch: images a step.
        size: height x width of the images; one number is both.
        num_classes: number of classes.
        dtype: what autocast computes in.
        device: where to run; auto takes a GPU if there is one.
        seconds: about how long to repeat each measurement.
        json: file for the numbers; - is standard output.
    """
    from caaseg.evaluation import model_benchmark
    from caaseg.evaluation.measure import provenance
    from caaseg.reports.tables import model_table

    if batch < 1:
        raise ValueError(f"--batch is {batch}; expected 1 or more")
    _check_writable(json=json)
    place, console = _device(device), _console(json)
    setting = model_benchmark.Setting(
        backbone=backbone,
        output_stride=output_stride,
        batch=batch,
        size=_area(size, "--size"),
        num_classes=num_classes,
        dtype=dtype,
    )
    costs = []
    for name in _words(models, "--models"):
        if console.is_terminal:
            console.print(f"measuring {name}", highlight=False)
        costs.append(model_benchmark.measure_model(name, setting, place, seconds=seconds))
    console.print(model_table(costs))
    if json is not None:
        records = [cost._asdict() for cost in costs]
        _write_json({**provenance(place, ARGUMENTS), "setting": setting._asdict(), "models": records}, json, console)
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
    from caaseg.evaluation import flops as counting
    from caaseg.models import ModelConfig
    from caaseg.reports.tables import flops_table, paper_table

    _check_writable(json=json)
    console = _console(json)
    if paper:
        rows = counting.paper_rows()
        console.print(paper_table(rows))
        console.print(f"Ours: {counting.CONVENTION}.", highlight=False)
        if json is not None:
            records = [row._asdict() for row in rows]
            _write_json({"convention": counting.CONVENTION, "size": [513, 513], "rows": records}, json, console)
        return 0
    height, width = _area(size, "--size")
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
        _write_json(content, json, console)
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

    from caaseg.evaluation import loader_benchmark as benchmark
    from caaseg.evaluation.measure import provenance
    from caaseg.reports.tables import loader_table

    for name, number in (("--batch-size", batch_size), ("--rounds", rounds), ("--steps", steps)):
        if number < 1:
            raise ValueError(f"{name} is {number}; expected 1 or more")
    crop_size = _area(crop, "--crop")
    console = _console(json)
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
            origin = provenance(_device("cpu"), ARGUMENTS)
        data = "scenes, drawn" if root is None else "CamVid, train"
        _write_json({**origin, "data": data, **content}, json, console)
    return 0


def evaluate_model(  # not `evaluate`: jsonargparse looks a command up in caaseg by its name, and would load torch
    model: str,
    *,
    dataset: str,
    root: Path | None = None,
    split: str = "val",
    scales: str = "1.0",
    flip: bool = False,
    window: str | None = None,
    average: Literal["logits", "probabilities"] = "logits",
    output_stride: OutputStride | None = None,
    boundary: bool = False,
    precision: Literal["32", "bf16"] = "32",
    device: Device = "auto",
    workers: int = 2,
    batch_size: int = 1,
    json: str | None = None,
    submission: Path | None = None,
) -> int:
    """Score a model: mean IoU, pixel and mean accuracy, class by class.

    Started by torchrun, its processes share the images.

    Args:
        model: a run's folder, the folder of a saved model, or a hub id.
        dataset: a name of caaseg data list; it says how classes are counted, as pascal_context (59) does.
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        scales: factors of the images' size, comma-separated; the scores at all of them are averaged.
        flip: average with the scores of the mirrored images too.
        window: height x width of sliding windows, such as 513x513; none takes images whole.
        average: what is averaged over scales, mirror images and windows.
        output_stride: another output stride than the model was trained with, 8 or 16.
        boundary: boundary IoU too, within 2% of the image's diagonal.
        precision: what the network computes in.
        device: where to run; auto takes a GPU if there is one.
        workers: processes that read images while the model computes.
        batch_size: images at once; above 1 they must be of one size.
        json: file for the scores and the confusion matrix; - is standard output.
        submission: for cityscapes, folder for predictions as the evaluation server reads them.
    """
    from caaseg.data.catalogue import open_dataset
    from caaseg.data.cityscapes import save_submission
    from caaseg.evaluation.evaluate import check_classes, evaluate, processes
    from caaseg.evaluation.inference import Predictor
    from caaseg.evaluation.measure import provenance
    from caaseg.models import load_model, with_output_stride
    from caaseg.reports import scores as reports

    if submission is not None and dataset != "cityscapes":
        raise ValueError(f"--submission is for the Cityscapes server, but --dataset is {dataset}; leave it out")
    factors = [_factor(word, "--scales") for word in _words(scales, "--scales")]
    area = None if window is None else _area(window, "--window")
    data = open_dataset(dataset, root, split)
    network = load_model(model)
    check_classes(network.config.num_classes, data)
    if output_stride is not None:
        network = with_output_stride(network, output_stride)
    console = _console(json)
    done = 0
    with processes(_device(device)) as (place, rank, ranks), _reporting(console) as report:

        def seen(batch: "Batch", predictions: "torch.Tensor") -> None:
            nonlocal done
            done += len(batch.names)
            if rank == 0:
                report("images", done, -(-len(data) // ranks))
            if submission is not None:
                for name, prediction in zip(batch.names, predictions.cpu().numpy(), strict=True):
                    save_submission(prediction, name, submission)

        predictor = Predictor(
            network.to(place), scales=factors, flip=flip, window=area, average=average, precision=precision
        )
        evaluation = evaluate(predictor, data, boundary=boundary, batch_size=batch_size, workers=workers, seen=seen)
    if rank > 0:  # the first process speaks for all
        return 0
    on, how = reports.protocol(dataset, split, evaluation), reports.manner(predictor, network.config.output_stride)
    if evaluation.confusion.any():
        console.print(reports.score_table(evaluation))
    for line in reports.lines(evaluation, on, how):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if network.config.classes not in (None, data.classes):
        console.print("Note: the model names its classes otherwise than the data do; check that they are the same.")
    if submission is not None:
        console.print(f"submission: {submission}", soft_wrap=True, highlight=False)
    if json is not None:
        described = {"model": model, "dataset": dataset, "split": split, "on": on, "how": how}
        content = {**provenance(place, ARGUMENTS), **described, **reports.scores_as_json(evaluation)}
        _write_json(content, json, console)
    return 0


def data_list() -> int:
    """What datasets there are: classes, sizes, splits and how to get each."""
    from rich.console import Console

    from caaseg.data.catalogue import DATASETS
    from caaseg.reports.datasets import catalogue_table

    Console().print(catalogue_table(DATASETS))
    return 0


def data_prepare(name: str, *, root: Path, addresses: str = "") -> int:
    """Fetch, verify, unpack and convert a dataset. What is there already is used; an interrupted run is repeated.

    Args:
        name: a name of caaseg data list.
        root: folder for the dataset.
        addresses: where to fetch files from instead, FILE=ADDRESS, comma-separated; the shipped ones are not verified.
    """
    from rich.console import Console

    from caaseg.data.prepare import prepare

    console = Console()
    with _reporting(console) as report:
        prepare(name, root, addresses=_addresses(addresses), report=report)
    console.print(f"prepared: {root}; see caaseg data check {name} --root {root}", soft_wrap=True, highlight=False)
    return 0


def data_check(name: str, *, root: Path, json: str | None = None) -> int:
    """Read every image and label: missing partners, damage, sizes, values, official counts, pixels of each class.

    Exit code 2 if anything is wrong.

    Args:
        name: a name of caaseg data list.
        root: folder of the dataset.
        json: file for what was found; - is standard output.
    """
    from caaseg.data.check import check
    from caaseg.reports.datasets import findings_as_json, findings_tables

    console = _console(json)
    with _reporting(console) as report:
        findings = check(name, root, report)
    for table in findings_tables(findings):
        console.print(table)
    for fault in findings.faults:
        console.print(f"{fault.split}: {fault.problem}", style="red", soft_wrap=True, highlight=False, markup=False)
    number = len(findings.faults)
    console.print("no fault" if number == 0 else f"{number} fault{'s' * (number > 1)}", highlight=False)
    if json is not None:
        _write_json(findings_as_json(findings), json, console)
    return 2 if findings.faults else 0


def data_show(name: str, *, out: Path, root: Path | None = None, split: str = "train", samples: int = 8) -> int:
    """Draw a sheet of samples with their labels laid over them and a legend.

    Args:
        name: a name of caaseg data list.
        out: file for the sheet (.png, .svg or .pdf).
        root: folder of the dataset; scenes need none.
        split: train, val or test, as the dataset has them.
        samples: how many, spread evenly over the split.
    """
    from rich.console import Console

    from caaseg.data.catalogue import find, open_dataset
    from caaseg.reports.draw import save
    from caaseg.reports.sheet import draw_sheet

    _check_figure(out, "--out")
    if samples < 1:
        raise ValueError(f"--samples is {samples}; expected 1 or more")
    dataset = open_dataset(name, root, split)
    shown = min(samples, len(dataset))
    drawn = [dataset[k * len(dataset) // shown] for k in range(shown)]
    title = f"{find(name).title}: {shown} of the {len(dataset)} images of {split}"
    save(draw_sheet(drawn, dataset.classes, dataset.palette, title), out)
    Console().print(f"sheet: {out}", soft_wrap=True, highlight=False)
    return 0


def recipes() -> int:
    """List the shipped recipes, each a complete file; train one by its name, or copy and change it."""
    from caaseg.recipe_files import SHIPPED, SUFFIX, recipe_names

    for name in recipe_names():
        first = (SHIPPED / f"{name}{SUFFIX}").read_text().partition("\n")[0]
        print(f"{name:32} {first.lstrip('# ') if first.startswith('#') else ''}".rstrip())
    return 0


def train_by_recipe(
    recipe: str,
    *,
    out: Path | None = None,
    resume: str | None = None,
    init_from: str | None = None,
    device: Device = "auto",
    devices: int = 1,
    overrides: Sequence[str] = (),
) -> int:
    """Train a model by a recipe. Every value of the recipe can be overridden, such as --model.output_stride 8.

    Args:
        recipe: a name of caaseg recipes, or a YAML file.
        out: the run's folder; runs/ and the recipe's name unless given.
        resume: auto goes on from the newest good checkpoint, or starts where there is none; or a checkpoint's path.
        init_from: start from the weights of this model: a run's folder, a saved model's folder or a hub id. It may
            have another number of classes.
        device: where to run; auto takes a GPU if there is one.
        devices: how many GPUs, or processes on a CPU, of this machine. Under torchrun or SLURM these say it.
        overrides: values of the recipe, as words.
    """
    from caaseg.recipe_files import load_recipe

    loaded = load_recipe(recipe, overrides)  # before the heavy imports: a mistake in it is said at once
    folder = out or Path("runs") / Path(recipe).with_suffix("").as_posix().replace("/", "-").strip(".-")

    from caaseg.training import runs

    console = _console(None)
    with _training_bar(console) as show:
        result = runs.train(
            loaded, folder, resume=resume, init_from=init_from, device=device, devices=devices, progress=show
        )
    if not runs.is_first_rank():
        console.quiet = True  # of several processes one speaks
    if not result.finished:
        console.print(f"stopped after step {result.step}; go on with --resume auto --out {folder}", highlight=False)
        return 143  # as a shell says it of a command that SIGTERM ended
    if result.best_mean_iou is not None:
        best = (
            f"best mean IoU on {loaded.data.val_split}: {100 * result.best_mean_iou:.2f}, after step {result.best_step}"
        )
        console.print(best, highlight=False)
    console.print(f"model: {folder / 'model'}", soft_wrap=True, highlight=False)
    return 0


COMMANDS: dict[str, Command | dict[str, Command]] = {
    "demo": demo,
    "evaluate": evaluate_model,
    "recipes": recipes,
    "train": train_by_recipe,  # named train, it would have jsonargparse look at, and import, caaseg.train
    "flops": flops,
    "data": {"list": data_list, "prepare": data_prepare, "check": data_check, "show": data_show},
    "benchmark": {"attention": benchmark_attention, "model": benchmark_model, "loader": benchmark_loader},
}
GROUP_HELP = {"data": "Get, convert, check and see datasets.", "benchmark": "Measure speed and memory."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends with exit code 2 and one message; --debug, anywhere, shows the traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ARGUMENTS[:] = words
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        overrides: list[str] = []
        explained = bool({"-h", "--help"} & set(words))
        if words[:1] == ["train"] and not explained:
            words, overrides = split_overrides(words, own=signature(train_by_recipe).parameters)
        parsed = _parser(explained).parse_args(words)
        if overrides:
            parsed["train"]["overrides"] = overrides
        return _call(COMMANDS, parsed)
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        if debug:
            traceback.print_exc()
        print(f"caaseg: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("caaseg: interrupted", file=sys.stderr)
        return 130


def _parser(explained: bool) -> ArgumentParser:
    parser = ArgumentParser(
        prog="caaseg",
        description="Semantic segmentation with Channelized Axial Attention.",
        epilog="A word --debug, anywhere, shows the traceback of an error.",
        version=__version__,
    )
    _add_commands(parser, COMMANDS, explained)
    return parser


def _add_commands(parser: ArgumentParser, commands: dict[str, Any], explained: bool) -> None:
    children = parser.add_subcommands(required=True, dest="command", metavar="COMMAND")
    for name, command in commands.items():
        text = GROUP_HELP[name] if isinstance(command, dict) else (command.__doc__ or "").split("Args:")[0].strip()
        child = ArgumentParser(description=text)
        children.add_subcommand(name, child, help=text.split("\n")[0])
        if isinstance(command, dict):
            _add_commands(child, command, explained)
        else:
            # Keyword-only parameters are options.
            child.add_function_arguments(command, as_group=False, as_positional=True, skip={"overrides"})
            if command is train_by_recipe and explained:
                add_recipe_arguments(child)
            _make_customary(child)


def _make_customary(parser: ArgumentParser) -> None:
    """Offer --output-stride for the parameter output_stride, and a plain --paper for --paper true."""
    for action in parser._actions:
        if action.default is False:
            action.nargs, action.const = "?", True
        action.option_strings = [name.replace("_", "-") for name in action.option_strings]
        parser._option_string_actions.update(dict.fromkeys(action.option_strings, action))


def _call(commands: dict[str, Any], parsed: Namespace) -> int:
    name = parsed["command"]
    command, options = commands[name], parsed[name]
    return _call(command, options) if isinstance(command, dict) else int(command(**options.as_dict()))


def _device(name: Device) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device is cuda, but torch sees no GPU here; use --device cpu or install a CUDA build of torch"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _console(json: str | None) -> "Console":
    """Standard output for people, unless the JSON goes there."""
    from rich.console import Console

    return Console(stderr=json == "-")


def _write_json(content: dict[str, Any], target: str, console: "Console") -> None:
    from caaseg.files import written_whole

    text = json_format.dumps(content, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    with written_whole(Path(target)) as aside:
        aside.write_text(text)
    console.print(f"numbers: {target}", soft_wrap=True, highlight=False)


@contextmanager
def _reporting(console: "Console") -> Iterator[Callable[[str, int, int | None], None]]:
    """What long work tells of its steps, as bars with the time left, on a terminal only."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def report(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step)
            bar.update(tasks[step], completed=done, total=total)

        yield report


@contextmanager
def _training_bar(console: "Console") -> Iterator[Callable[["Progress"], None]]:
    """A bar with loss, images a second and the time left, on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("training", total=None)

        def show(progress: "Progress") -> None:
            score = "" if progress.mean_iou is None else f", mean IoU {100 * progress.mean_iou:.1f}"
            text = f"loss {progress.loss:.3f}, {progress.images_per_second:.0f} images/s{score}"
            bar.update(task, description=text, completed=progress.step, total=progress.steps)

        yield show


def _addresses(text: str) -> dict[str, str]:
    addresses = {}
    for word in (word.strip() for word in text.split(",") if word.strip()):
        file, equals, address = word.partition("=")
        if not equals or not file or not address:
            raise ValueError(f"--addresses has {word!r}; expected FILE=ADDRESS")
        addresses[file] = address
    return addresses


def _check_figure(path: Path, option: str) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{option} is {str(path)!r}; expected a name that ends in .png, .svg or .pdf")


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option} is {text!r}; expected one value or several separated by commas")
    return words


def _whole(word: str, option: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 1_000_000:
        raise ValueError(f"{option} has {word!r}; expected a whole number from 1 to a million")
    return int(word)


def _is_out_of_memory(error: RuntimeError) -> bool:
    from caaseg.evaluation.measure import is_out_of_memory

    return is_out_of_memory(error)


def _check_writable(**files: str | Path | None) -> None:
    """Refuse, before any work, a place that nothing can be written to."""
    for option, file in files.items():
        if file is not None and file != "-" and (str(file) in ("", ".") or Path(file).is_dir()):
            raise ValueError(f"--{option} is {str(file)!r}; expected the name of a file")


def _factor(word: str, option: str) -> float:
    try:
        factor = float(word)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"{option} has {word!r}; expected a number above 0, such as 0.75")
    return factor


def _size(word: str) -> tuple[int, int, int]:
    parts = word.lower().split("x")
    if len(parts) != 3:
        raise ValueError(f"--sizes has {word!r}; expected batch x height x width, such as 16x65x65")
    batch, height, width = (_whole(part, "--sizes") for part in parts)
    return batch, height, width


def _area(text: str, option: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2:
        raise ValueError(f"{option} is {text!r}; expected height x width, such as 352x480, or one number for both")
    height, width = _whole(parts[0], option), _whole(parts[-1], option)
    return height, width


def _chosen(text: str, known: Sequence[Any], option: str) -> list[Any]:
    words = _words(text, option)
    for word in words:
        if word not in known:
            raise ValueError(f"{option} has {word!r}; expected any of {', '.join(known)}")
    return words
