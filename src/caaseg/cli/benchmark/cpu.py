"""`caaseg benchmark cpu`: inference of one image on a CPU."""

from pathlib import Path
from typing import Literal

from caaseg.cli.arguments import check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, progress_bars, write_json
from caaseg.config import Count, Size


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
        f"INT8 is {ratios['int8_over_onnx']:.3g} times (caa) and {speedup:.3g} times (camvid) as fast as float32 ONNX",
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
