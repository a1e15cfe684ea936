"""Benchmark of inference on a CPU: our model and torchvision's FCN in float32, and our models in INT8.

Other programs can only slow a measurement down. So all models are built first, then measured in turn, several times,
and the fastest call of each model counts.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from caaseg.benchmarks.model import Setting, build, inference_network, outputs
from caaseg.data.calibration import Calibration
from caaseg.data.sample import SegmentationDataset
from caaseg.evaluation.int8 import Int8Scores, Progress, export_int8
from caaseg.models import Segmenter
from caaseg.models.export import export_model, scene_images
from caaseg.models.onnx import INPUT, OUTPUT, open_session
from caaseg.models.quantization import quantize_onnx

CPU = torch.device("cpu")
CALLS = 3
"""Consecutive calls of a model per round; the first fills the caches."""
CALIBRATION_SIZE = 128

Run = Callable[[], object]


class Timing(NamedTuple):
    """Inference of one image by a model in one form."""

    model: str
    form: str  # eager, compiled, onnx, winograd (ONNX with Winograd's algorithm) or int8
    seconds: float  # fastest call
    median_s: float

    @property
    def images_per_second(self) -> float:
        return 1 / self.seconds


def measure_in_turn(runs: Mapping[tuple[str, str], Run], rounds: int, progress: Progress) -> list[Timing]:
    """Measure models in turn.

    Args:
        runs: functions that predict one image, by model and form.
        rounds: number of turns of each.
        progress: called after each turn.
    """
    durations_s: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()  # compiles the model
    for k in range(rounds):
        for key, run in runs.items():
            for _ in range(CALLS):
                start = time.perf_counter()
                run()
                durations_s[key].append(time.perf_counter() - start)
        progress("measuring", k + 1, rounds)
    return [Timing(*key, min(times), statistics.median(times)) for key, times in durations_s.items()]


def build_runs(setting: Setting, directory: Path) -> dict[tuple[str, str], Run]:
    """Build CAA and torchvision's FCN with random weights in all forms, INT8 for ours only.

    Args:
        setting: backbone, image size and number of classes.
        directory: directory for the exported files.
    """
    torch.manual_seed(0)
    images = torch.randn(1, 3, *setting.size)
    channels_last = images.contiguous(memory_format=torch.channels_last)
    runs: dict[tuple[str, str], Run] = {}
    for name in ("caa", "torchvision:fcn"):
        model = build(name, setting).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for form in ("eager", "compiled"):
            runs[name, form] = _torch_run(inference_network(model, CPU, form), channels_last)
        if isinstance(model, Segmenter):
            paths = {form: directory / f"{form}.onnx" for form in ("onnx", "winograd", "int8")}
            export_model(model, paths["onnx"])
            export_model(model, paths["winograd"], winograd=True)
            quantize_onnx(paths["onnx"], paths["int8"], _scenes())
        else:
            paths = {"onnx": directory / "fcn.onnx"}
            _export_fcn(model, images, paths["onnx"])
        runs |= {(name, form): _onnx_run(path, images) for form, path in paths.items()}
    return runs


def _torch_run(network: nn.Module, images: Tensor) -> Run:
    def run() -> Tensor:
        with torch.inference_mode():
            return outputs(network(images))[0]

    return run


def _onnx_run(path: Path, images: Tensor) -> Run:
    session, inputs = open_session(path, CPU), {INPUT: images.numpy()}
    return lambda: session.run([OUTPUT], inputs)


def _export_fcn(model: nn.Module, images: Tensor, path: Path) -> None:
    """Export torchvision's model for one image size: onnxruntime upsamples to a fixed size faster."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: Tensor) -> Tensor:
            return outputs(self.model(images))[0]

    with warnings.catch_warnings(action="ignore"):  # warnings of torch's exporter about its internals
        exported = torch.onnx.export(
            Logits(), (images,), dynamo=True, verbose=False, input_names=[INPUT], output_names=[OUTPUT]
        )
    assert exported is not None
    exported.save(str(path), external_data=False)


def _scenes() -> Iterator[Tensor]:
    """Yield images for the calibration of a model with random weights, of which only the speed matters."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield scene_images(1, CALIBRATION_SIZE, CALIBRATION_SIZE, rng)


class Int8Result(NamedTuple):
    """A trained model before and after quantization."""

    timings: list[Timing]
    scores: Int8Scores


def measure_int8(
    name: str,
    model: Segmenter,
    calibration: Calibration,
    dataset: SegmentationDataset,
    directory: Path,
    *,
    rounds: int,
    progress: Progress,
) -> Int8Result:
    """Export a trained model in float32 and INT8, measure both on one image of a dataset, and score both on all.

    Args:
        name: name of the model in the results.
        model: the model.
        calibration: images for calibration.
        dataset: labeled images.
        directory: directory for the exported files.
        rounds: number of measurements of each.
        progress: called after each step.
    """
    export_model(model, directory / "trained.onnx")
    _, scores = export_int8(model, directory / "trained-int8.onnx", calibration, dataset=dataset, progress=progress)
    images = dataset[0].image[None].float()
    files = {"onnx": "trained.onnx", "int8": "trained-int8.onnx"}
    runs = {(name, form): _onnx_run(directory / file, images) for form, file in files.items()}
    return Int8Result(measure_in_turn(runs, rounds, progress), scores)


def ratios(timings: list[Timing]) -> dict[str, float]:
    """Return speedups: of our model over torchvision's, and of INT8 over float32 ONNX.

    Both models are in their fastest float32 form; `caa_over_fcn_plain` is without Winograd's algorithm.
    """
    seconds = {(timing.model, timing.form): timing.seconds for timing in timings}

    def best(model: str, *forms: str) -> float:
        return min(seconds[model, form] for form in forms)

    plain = ("eager", "compiled", "onnx")
    fcn = best("torchvision:fcn", *plain)
    return {
        "caa_over_fcn": fcn / best("caa", *plain, "winograd"),
        "caa_over_fcn_plain": fcn / best("caa", *plain),
        "int8_over_onnx": seconds["caa", "onnx"] / seconds["caa", "int8"],
    }


def instructions() -> list[str]:
    """Return the processor's instructions for products of 8-bit integers; empty if unknown."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [name for name in ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8") if name in flags]
