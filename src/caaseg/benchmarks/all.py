"""All committed speed and memory numbers: each part is one `caaseg benchmark` command with a file of its own.

A part that has finished is not repeated for the same commit, command and device, so an interrupted benchmark continues.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from caaseg.files import read_json

INDEX = "all.json"
RESNET101 = ("--model.backbone", "resnet101", "--model.output-stride", "8", "--model.channels", "512")
TINY = ("--device", "cpu", "--seconds", "0")
TINY_MODELS = ("--backbone", "test_resnet", "--batch", "2", "--num-classes", "3", "--sizes", "33", *TINY)
TINY_NETWORK = ("--model.backbone", "test_resnet", "--model.channels", "16", "--model.key-channels", "4")
TINY_TRAINING = (*TINY_NETWORK, "--data.crop", "32", "32", "--batch-size", "2", "--data.workers", "0")


class Part(NamedTuple):
    """One command and the file of its numbers, NAME.json."""

    name: str
    device: Literal["cuda", "cpu"]
    seconds: int  # estimate on one H200, or on two cores
    arguments: tuple[str, ...]  # after `caaseg benchmark`; CAMVID and OUT are replaced by directories
    quick: tuple[str, ...]  # the same at tiny sizes on a CPU

    @property
    def needs_camvid(self) -> bool:
        return "CAMVID" in self.arguments


def _models(*models: str) -> tuple[str, str, str]:
    return "model", "--models", ",".join(models)


PARTS = (
    Part(
        "fused", "cuda", 35,
        ("attention", "--dtypes", "bfloat16", "--groups", "16", "--implementations", "axial,fused,factorised,grouped",
         "--seconds", "0.2"),
        ("attention", "--sizes", "1x5x5", "--groups", "2", "--implementations", "axial,factorised,grouped",
         "--channels", "8", "--key-channels", "4", *TINY),
    ),
    Part(
        "attention", "cuda", 60,
        ("attention", "--sizes", "16x33x33,16x65x65,8x97x97,1x129x257", "--groups", "1,2,4,8,16,33,65",
         "--seconds", "0.05", "--figure", "OUT/attention.png"),
        ("attention", "--sizes", "1x5x5", "--groups", "1,2", "--channels", "8", "--key-channels", "4", *TINY,
         "--figure", "OUT/attention.png"),
    ),
    Part(
        "model", "cuda", 45,
        (*_models("caa:captured", "torchvision:fcn", "axial:captured", "caa:grouped", "caa", "caa:grouped:plain"),
         "--seconds", "0.7"),
        (*_models("caa", "torchvision:fcn"), *TINY_MODELS, "--backbone", "resnet50"),
    ),
    Part(
        "model_compiled", "cuda", 100,
        (*_models("caa:captured", "torchvision:fcn:compiled", "caa:compiled", "torchvision:fcn"), "--seconds", "1"),
        (*_models("caa"), *TINY_MODELS),  # compilation takes minutes on a CPU
    ),
    Part(
        "latency", "cuda", 45,
        (*_models("caa:captured", "torchvision:fcn:compiled", "torchvision:fcn"),
         "--batch", "1", "--sizes", "513,1025", "--inference-only", "--seconds", "0.3"),
        (*_models("caa"), *TINY_MODELS, "--inference-only"),
    ),
    Part(
        "growth", "cuda", 45,
        (*_models("caa:captured", "self_attention:captured", "caa:grouped:captured"), "--backbone", "resnet50",
         "--batch", "2", "--sizes", "257,513,1025,2049", "--seconds", "0.15", "--figure", "OUT/growth.png"),
        (*_models("caa", "self_attention"), *TINY_MODELS, "--figure", "OUT/growth.png"),
    ),
    Part(
        "heads_cost", "cuda", 25,
        (*_models("fcn:captured", "axial:captured", "axial_se:captured", "caa:captured", "self_attention:captured",
                  "channelized_self_attention:captured", "danet:captured"),
         "--backbone", "resnet34", "--sizes", "256x320", "--num-classes", "11", "--seconds", "0.3"),
        (*_models("fcn", "danet"), *TINY_MODELS),
    ),
    Part(
        "evaluation", "cuda", 35,
        ("evaluation", "camvid", "--dataset", "camvid", "--root", "CAMVID"),
        ("evaluation", "camvid", "--dataset", "camvid", "--root", "CAMVID", "--split", "train", "--images", "1",
         "--scales", "0.25", "--device", "cpu", "--precision", "32", "--workers", "0"),
    ),
    Part(
        "train_resnet101", "cuda", 35,
        ("train", "folder/caa_resnet18", *RESNET101, "--data.crop", "513", "513", "--batch-size", "16",
         "--precision", "bf16", "--cuda-graph", "true", "--fused-batch-norm", "true", "--optimizer.name", "sgd",
         "--optimizer.ema", "none", "--optimizer.clip-grad-norm", "none", "--data.workers", "14", "--seconds", "10"),
        ("train", "folder/caa_resnet18", *TINY_TRAINING, *TINY),
    ),
    Part(
        "train_camvid", "cuda", 25,
        ("train", "camvid/caa_resnet18", "--data.root", "CAMVID", "--seconds", "6"),
        ("train", "scenes/caa_resnet18", *TINY_TRAINING, "--data.scenes.size", "64", "64", *TINY),
    ),
    Part(
        "train_camvid_device", "cuda", 25,
        ("train", "camvid/caa_resnet18", "--data.root", "CAMVID", "--data.cache", "device", "--seconds", "6"),
        ("train", "scenes/caa_resnet18", *TINY_TRAINING, "--data.scenes.size", "64", "64", "--data.scenes.length", "9",
         "--data.cache", "device", *TINY),
    ),
    Part(
        "loader", "cpu", 100,
        ("loader", "--root", "CAMVID", "--rounds", "15"),
        ("loader", "--rounds", "1", "--steps", "1", "--batch-size", "2", "--crop", "32"),
    ),
    Part(
        "model_cpu", "cpu", 300,
        (*_models("caa:compiled", "caa", "torchvision:fcn"), "--backbone", "resnet50", "--sizes", "512x512",
         "--batch", "1", "--inference-only", "--dtype", "float32", "--device", "cpu", "--seconds", "10",
         "--rounds", "3"),
        (*_models("caa"), *TINY_MODELS, "--inference-only", "--dtype", "float32"),
    ),
    Part(
        "cpu", "cpu", 400,
        ("cpu", "--root", "CAMVID", "--rounds", "20"),
        ("cpu", "--root", "CAMVID", "--rounds", "1", "--size", "65", "65", "--num-classes", "3"),
    ),
)  # fmt: skip
"""All parts. The parts for a GPU come first, so that the GPU does not wait in between."""


class Finished(NamedTuple):
    """Result of a part, as stored in the index."""

    name: str
    command: list[str]
    commit: str | None
    device: str
    estimate_s: int
    seconds: float
    exit_code: int

    def covers(self, other: "Finished") -> bool:
        """Return whether this result makes another run unnecessary. Uncommitted code is always measured again."""
        is_committed = self.commit is not None and "+" not in self.commit
        return is_committed and self.exit_code == 0 and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return self.name, self.command, self.commit, self.device


def run_parts(
    parts: Sequence[Part],
    out: Path,
    *,
    commit: str | None,
    device: str,
    camvid: Path | None = None,
    quick: bool = False,
    run: Callable[[list[str], Path], int],
) -> Iterator[tuple[Finished, bool]]:
    """Run the parts that have not finished before. Yield each result, and whether it is from an earlier run.

    A part that fails does not end the others.

    Args:
        parts: the parts to run.
        out: directory of the numbers.
        commit: commit of the code.
        device: name of the device that is measured.
        camvid: directory of CamVid.
        quick: use tiny sizes on a CPU.
        run: runs a command with a log file and returns its exit code.
    """
    before = read_index(out)
    places = {"CAMVID": str(camvid), "OUT": str(out)}
    for part in parts:
        words = (word.split("/", 1) for word in (part.quick if quick else part.arguments))
        filled = ["/".join([places.get(first, first), *rest]) for first, *rest in words]
        command = ["benchmark", *filled, "--json", str(out / f"{part.name}.json")]
        planned = Finished(part.name, command, commit, device, part.seconds, 0.0, 0)
        found = next((one for one in before if one.covers(planned)), None)
        if found is not None and (out / f"{part.name}.json").is_file():
            yield found, True
            continue
        start = time.perf_counter()
        code = run(command, out / f"{part.name}.log")
        yield planned._replace(seconds=round(time.perf_counter() - start, 1), exit_code=code), False


def run_command(arguments: list[str], log: Path) -> int:
    """Run a caaseg command in a process of its own, so that no part affects another. Return its exit code."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "caaseg", *arguments]
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def read_index(out: Path) -> list[Finished]:
    """Return the results of the parts that have run before."""
    if not (out / INDEX).is_file():
        return []
    content = read_json(out / INDEX, "delete it to measure all parts again")
    return [Finished(**record) for record in content["parts"]]


class Goal(NamedTuple):
    """A number that the project wants to reach."""

    name: str
    value: float | None  # None if its part has not run
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def goals(out: Path, names: Iterable[str]) -> list[Goal]:
    """Compare the numbers of parts that have finished with the goals of the project."""
    advice = "delete it to measure it again"
    files: dict[str, dict[str, Any]] = {name: read_json(out / f"{name}.json", advice) for name in names}

    def block(number: str, height: int, width: int) -> float | None:
        size = {"implementation": "fused", "height": height, "width": width}
        return _find(files.get("fused", {}).get("ratios", []), size).get(number)

    def model(part: str, name: str, number: str, size: int = 513) -> float | None:
        return _find(files.get(part, {}).get("models", []), {"model": name, "size": [size, size]}).get(number)

    def ratio(ours: float | None, other: float | None) -> float | None:
        return None if ours is None or not other else ours / other

    training, inference = "training_images_per_second", "inference_images_per_second"
    fcn = "torchvision:fcn:compiled"
    found = [
        Goal(f"forward over lower bound, {h} x {w}", block("forward_graph_over_floor", h, w), at_most=bound)
        for h, w, bound in ((33, 33, 3.0), (65, 65, 3.0), (97, 97, 3.0), (129, 257, 3.5), (129, 513, 3.5))
    ]
    speedup = block("training_graph_speedup_over_grouped_16", 65, 65)
    found.append(Goal("forward and backward, speedup over grouped, 65 x 65", speedup, at_least=80))
    for title, number, bound in (("training", training, 1.45), ("inference", inference, 1.25)):
        ours, other = (model("model_compiled", name, number) for name in ("caa:captured", fcn))
        found.append(Goal(f"{title}, speedup over compiled FCN", ratio(ours, other), at_least=bound))
    for size in (513, 1025):
        ours, other = (model("latency", name, inference, size) for name in ("caa:captured", fcn))
        found.append(Goal(f"latency at {size}, compared with compiled FCN", ratio(other, ours), at_most=1.0))
    command, camvid, on_device = (
        files.get(name, {}) for name in ("train_resnet101", "train_camvid", "train_camvid_device")
    )
    share = ratio(command.get("images_per_second"), model("model", "caa:captured", training))
    on_cpu, shipped = (files.get("cpu", {}).get(name, {}) for name in ("ratios", "camvid"))
    lost = None if not shipped else 100 * (shipped["float32_mean_iou"] - shipped["int8_mean_iou"])
    return [
        *found,
        Goal("caaseg train, share of the benchmark's images per second", share, at_least=0.95),
        Goal("camvid/caa_resnet18, GPU utilization", camvid.get("gpu_utilization"), at_least=0.85),
        Goal("the same with data.cache device", on_device.get("gpu_utilization"), at_least=0.85),
        Goal("camvid/caa_resnet18, seconds to the first step", camvid.get("first_step_s"), at_most=20.0),
        Goal("CPU, speedup over FCN in float32", on_cpu.get("caa_over_fcn"), at_least=1.0),
        Goal("CPU, speedup of INT8 over float32 ONNX", on_cpu.get("int8_over_onnx"), at_least=1.5),
        Goal("CPU, points of mean IoU that INT8 loses", lost, at_most=1.0),
    ]


def _find(records: Sequence[dict[str, Any]], values: dict[str, Any]) -> dict[str, Any]:
    """Return the first record with these values, or an empty one."""
    return next((one for one in records if all(one.get(key) == value for key, value in values.items())), {})
