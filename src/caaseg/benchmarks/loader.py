"""Benchmark of the training loader against torchvision's reference pipeline: images per second on one core.

Both read the same JPEG images and PNG masks with one worker and return a normalized float batch with int64 labels,
after random scaling (0.5 to 2), crop and flip with the same distribution. The reference is the training preset of
torchvision's `references/segmentation` with v2 transforms, on tensors and on PIL images.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from caaseg.config import Augmentation
from caaseg.data.datasets.camvid import UNLABELED, CamVid
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.loader import TrainingLoader
from caaseg.data.sample import IGNORE
from caaseg.data.transforms import GRAY, IMAGENET_MEAN, IMAGENET_STD, normalize
from caaseg.torchvision_compat import declare_missing_operators

Pipeline = Literal["caaseg", "torchvision, tensors", "torchvision, PIL"]
SCALES = (0.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Files, crop and batch size of all pipelines."""

    root: Path  # directory in the layout of CamVid
    crop: tuple[int, int]
    batch_size: int = 16
    steps: int = 12  # timed batches per round

    @property
    def pairs(self) -> list[tuple[Path, Path]]:
        return [(pair.image, pair.label) for pair in CamVid(self.root, "train").pairs if pair.label is not None]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of one pipeline."""

    pipeline: Pipeline
    rounds: list[float] = field(default_factory=list)  # images per second

    @property
    def images_per_second(self) -> float:
        return statistics.median(self.rounds)


def run(workload: Workload, rounds: int, *, progress: Callable[[], None] = lambda: None) -> list[Speed]:
    """Measure the pipelines in turns, so that other load on the machine affects all of them equally."""
    speeds = [Speed(pipeline=pipeline) for pipeline in get_args(Pipeline)]
    with one_core():
        for turn in range(rounds):
            for speed in speeds:
                # The first batches include the start of the worker.
                stream = batches(speed.pipeline, workload, seed=turn, workers=1)
                for _ in islice(stream, 2):
                    pass
                start = time.perf_counter()
                for _ in islice(stream, workload.steps):
                    pass
                duration_s = time.perf_counter() - start
                speed.rounds.append(workload.steps * workload.batch_size / duration_s)
                del stream  # stops its worker, which would slow down the next pipeline
                progress()
    return speeds


def batches(pipeline: Pipeline, workload: Workload, *, seed: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalized images (N, 3, H, W) and labels (N, H, W) forever."""
    if pipeline == "caaseg":
        augmentation = Augmentation(crop=workload.crop, scales=SCALES, scale_step=None)
        dataset = CamVid(workload.root, "train")
        loader = TrainingLoader(dataset, augmentation, batch_size=workload.batch_size, seed=seed, workers=workers)
        for batch in loader:
            yield normalize(batch.images), batch.labels.long()  # in training this happens on the device
    samples = ReferenceSamples(workload, "tensor" if pipeline == "torchvision, tensors" else "PIL")
    torch.manual_seed(seed)
    # A single epoch without end: a new epoch would restart the worker.
    endless = RandomSampler(samples, replacement=True, num_samples=10**9)
    yield from DataLoader(samples, workload.batch_size, sampler=endless, num_workers=workers)


class ReferenceSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples read and transformed as in torchvision's reference."""

    def __init__(self, workload: Workload, backend: Literal["tensor", "PIL"]) -> None:
        declare_missing_operators()
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        self.pairs = workload.pairs
        self.as_mask = tv_tensors.Mask
        with Image.open(self.pairs[0][0]) as first:
            shorter = min(first.size)  # RandomResize takes sizes in pixels, so all images must have one size
        image_type = tv_tensors.Image if backend == "tensor" else Tensor
        fill = {tv_tensors.Mask: IGNORE, "others": GRAY}
        self.transform = v2.Compose(
            [
                *([v2.ToImage()] if backend == "tensor" else []),
                v2.RandomResize(min_size=int(SCALES[0] * shorter), max_size=int(SCALES[1] * shorter)),
                v2.RandomHorizontalFlip(0.5),
                v2.RandomCrop(workload.crop, pad_if_needed=True, fill=fill),
                *([v2.PILToTensor()] if backend == "PIL" else []),
                v2.ToDtype({image_type: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
                v2.Normalize(mean=IMAGENET_MEAN, std=IMAGENET_STD),
                v2.ToPureTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_path, label_path = self.pairs[index]
        with Image.open(image_path) as image, Image.open(label_path) as label:
            mask = self.as_mask(torch.from_numpy(np.array(label)))
            transformed: tuple[Tensor, Tensor] = self.transform(image.convert("RGB"), mask)
        return transformed


def write_scenes(directory: Path, number: int, split: Literal["train", "val"] = "train") -> None:
    """Write synthetic scenes as files in the layout of CamVid, with its image size and unlabeled value."""
    scenes = Scenes(split, length=number, size=(360, 480))
    images, labels = directory / split, directory / f"{split}annot"
    for folder in (images, labels):
        folder.mkdir(parents=True)
    for sample in map(scenes.__getitem__, range(number)):
        label = np.where(sample.label == IGNORE, UNLABELED, sample.label).astype(np.uint8)
        image = Image.fromarray(sample.image.permute(1, 2, 0).numpy())
        image.save(images / f"{sample.name}.jpg", quality=90, subsampling="4:4:4")
        Image.fromarray(label).save(labels / f"{sample.name}.png")
    names = "".join(f"{scenes[index].name}\n" for index in range(number))
    (directory / f"{split}.txt").write_text(names, encoding="utf-8")


def as_json(workload: Workload, speeds: Sequence[Speed]) -> dict[str, Any]:
    """Return workload, speeds and speedup as plain values."""
    return {
        "images": len(workload.pairs),
        "crop": list(workload.crop),
        "batch_size": workload.batch_size,
        "images_per_round": workload.steps * workload.batch_size,
        "measurements": [{**asdict(speed), "images_per_second": speed.images_per_second} for speed in speeds],
        "speedup_over_faster_reference": speedup(speeds),
        "readers": {"torchvision": version("torchvision"), "pillow": version("pillow")},
    }


def speedup(speeds: Sequence[Speed]) -> float:
    """Return the speedup over the faster reference: the median of the ratios within each round.

    Ratios within a round are robust against a machine that becomes busier during the benchmark.
    """
    ours, *references = speeds
    faster = max(references, key=lambda speed: speed.images_per_second)
    return statistics.median(a / b for a, b in zip(ours.rounds, faster.rounds, strict=True))


@contextmanager
def one_core() -> Iterator[None]:
    """Limit this process and its workers to one thread and, if the system supports it, one core."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(1)
    if cores is not None:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)
