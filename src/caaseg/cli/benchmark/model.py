"""`caaseg benchmark model`: speed and memory of whole models, ours and others'."""

from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from caaseg.cli.arguments import Device, Figure, Names, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import Count, NotNegative, OutputStride, Size


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
        sizes: image sizes, such as 513 for 513 x 513, or 257x513; several sizes show how the cost grows.
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
