"""Benchmark of the loader: all pipelines do the same work; the command writes its numbers."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from caaseg.benchmarks.loader import Pipeline, Speed, Workload, batches, one_core, speedup, write_scenes
from caaseg.cli import main
from caaseg.data.datasets.camvid import CamVid
from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE

PIPELINES: tuple[Pipeline, ...] = ("caaseg", "torchvision, tensors", "torchvision, PIL")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scenes")
    write_scenes(directory, number=5)
    return directory


def test_written_scenes_are_read_back_with_the_same_labels_and_names_and_similar_images(root: Path) -> None:
    read, drawn = CamVid(root, "train"), Scenes(length=5, size=(360, 480))
    assert len(read) == 5
    for index in range(5):
        assert torch.equal(read[index].label, drawn[index].label)
        difference = read[index].image.float() - drawn[index].image.float()
        assert difference.abs().mean() < 6  # JPEG is lossy
        assert read[index].name == drawn[index].name


def test_all_pipelines_return_batches_of_the_same_distribution(root: Path) -> None:
    workload = Workload(root=root, crop=(352, 480), batch_size=10)
    padding, means, stds = {}, {}, {}
    for pipeline in PIPELINES:
        drawn = list(islice(batches(pipeline, workload, seed=0, workers=0), 6))
        for images, labels in drawn:
            assert images.shape == (10, 3, 352, 480)
            assert images.dtype == torch.float32
            assert labels.shape == (10, 352, 480)
            assert labels.dtype == torch.int64
        images, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        padding[pipeline] = (labels == IGNORE).float().mean().item()
        means[pipeline], stds[pipeline] = images.mean().item(), images.std().item()
    for figures, tolerance in ((padding, 0.1), (means, 0.1), (stds, 0.1)):
        assert max(figures.values()) - min(figures.values()) < tolerance, figures
    assert min(padding.values()) > 0.05  # scales below 1 need padding


def test_the_speedup_is_the_median_within_rounds_over_the_faster_reference() -> None:
    rounds: dict[Pipeline, list[float]] = {
        "caaseg": [300.0, 400.0, 100.0],
        "torchvision, tensors": [100.0, 100.0, 50.0],
        "torchvision, PIL": [60.0, 60.0, 60.0],
    }
    assert speedup([Speed(pipeline=pipeline, rounds=rounds[pipeline]) for pipeline in PIPELINES]) == 3.0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind a process to a core")
def test_one_core_restores_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == before


def test_the_command_measures_synthetic_scenes_and_writes_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--rounds",
        "2",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--crop",
        "64x96",
        "--json",
        str(tmp_path / "l.json"),
    ]
    assert main(["benchmark", "loader", *arguments]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "l.json").read_text())
    assert [record["pipeline"] for record in found["measurements"]] == list(PIPELINES)
    assert all(len(record["rounds"]) == 2 and min(record["rounds"]) > 0 for record in found["measurements"])
    speeds = [Speed(pipeline=record["pipeline"], rounds=record["rounds"]) for record in found["measurements"]]
    assert [speed.images_per_second for speed in speeds] == [r["images_per_second"] for r in found["measurements"]]
    assert found["speedup_over_faster_reference"] == speedup(speeds)
    assert found["data"] == "synthetic scenes"
    assert found["crop"] == [64, 96]
    assert {"command", "commit", "hardware", "versions"} <= set(found)
    assert found["hardware"]["threads"] == 1
    assert "times as fast as the faster reference" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--crop", "3x5x2"], "--crop is '3x5x2'; expected at most 2 items after validation, not 3"),
        (["--crop", "0x480"], "--crop is '0x480'; expected greater than or equal to 1"),
        (["--rounds", "0"], "--rounds is 0; expected greater than or equal to 1"),
    ],
)
def test_bad_options_end_with_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "loader", *arguments]) == 2
    assert capsys.readouterr().err == f"caaseg: {message}\n"
