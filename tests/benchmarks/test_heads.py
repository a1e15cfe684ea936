"""Benchmark of our heads against the heads of mmsegmentation."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from caaseg.benchmarks.heads import COMPARED, HeadCosts, Part, as_json, geometric_means, measure_heads, ratios
from caaseg.benchmarks.mmseg_settings import CONFIGURATIONS, mmseg_settings
from caaseg.benchmarks.model import ModelCost, Setting, build, outputs, presence_logits
from caaseg.cli import main
from caaseg.models import Segmenter

SETTING = Setting(backbone="resnet50c", output_stride=8, batch=2, size=(33, 41), num_classes=4, dtype="float32")


def cost(name: str, training: float | None, inference: float = 1.0) -> ModelCost:
    return ModelCost(name, (33, 33), training, None if training is None else 100, inference, 50)


def test_ratios_are_ours_divided_by_theirs_and_their_mean_is_geometric() -> None:
    measured = {
        Part("psp", "eager", True): cost("psp", 4.0, 3.0),
        Part("psp", "eager", False): cost("mmseg:psp", 2.0),
        Part("fcn", "eager", True): cost("fcn", 16.0),
        Part("fcn", "eager", False): cost("mmseg:fcn", 2.0),
        Part("ann", "eager", True): cost("ann", 5.0),
        Part("ann", "eager", False): cost("mmseg:ann", None),  # out of memory in training
        Part("psp", "regional", True): cost("psp:regional", 5.0),
    }
    costs = HeadCosts(measured, {Part("psp", "regional", False): "RuntimeError: broken"}, [])
    found = ratios(costs)
    assert list(found) == ["eager"]
    assert found["eager"]["psp"]["training_images_per_second"] == 2
    assert "training_images_per_second" not in found["eager"]["ann"]
    means = geometric_means(costs)["eager"]
    assert means["training_images_per_second"] == pytest.approx(4)
    assert means["inference_images_per_second"] == pytest.approx(3 ** (1 / 3))
    content = as_json(costs)
    assert content["failed"] == {"mmseg:psp:regional": "RuntimeError: broken"}
    assert content["geometric_means"]["eager"] == means
    assert json.loads(json.dumps(content))["settings"]["fcn"]["aux_stage"] == 3


def test_every_head_that_mmsegmentation_has_is_compared() -> None:
    assert set(COMPARED) == set(CONFIGURATIONS)


@pytest.mark.parametrize("head", COMPARED)
def test_our_head_with_the_settings_of_mmsegmentation_is_built(head: str) -> None:
    settings = mmseg_settings(head)
    with torch.device("meta"):
        model = build(head, SETTING, settings)
    assert {name: getattr(model.config, name) for name in settings} == settings


def test_the_command_needs_mmsegmentation_and_known_heads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "heads", "--heads", "caa", "--device", "cpu"]) == 2
    assert "--heads has 'caa'; expected any of fcn, " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mmseg", None)
    assert main(["benchmark", "heads", "--device", "cpu"]) == 2
    assert "the package mmseg is not installed; pip install mmsegmentation==1.2.2" in capsys.readouterr().err


@pytest.fixture
def mmseg() -> None:
    """Skip the test if mmsegmentation, which is not a dependency, is not installed."""
    for package in ("mmseg", "mmcv", "mmengine"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.slow
@pytest.mark.usefixtures("mmseg")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("head", COMPARED)
def test_our_head_and_that_of_mmsegmentation_have_the_same_outputs_and_parameters(head: str) -> None:
    settings = mmseg_settings(head)
    setting = SETTING._replace(output_stride=settings["output_stride"], aux=settings["aux"])
    ours, theirs = build(head, setting, settings), build(f"mmseg:{head}", setting)
    assert isinstance(ours, Segmenter)
    images = torch.randn(2, 3, 33, 41)
    coarse, upsampled = ours.coarse(images), theirs(images)
    assert len(outputs(coarse)) == len(outputs(upsampled))
    assert all(logits.shape == (2, 4, 33, 41) for logits in outputs(upsampled))
    assert (presence_logits(coarse) is None) == (presence_logits(upsampled) is None)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (ours, theirs)]
    fixed = 512 * 513 if head == "emanet" else 0  # mmsegmentation also counts weights that are never trained
    assert sizes[0] == sizes[1] - fixed
    assert len(outputs(theirs.eval()(images))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("mmseg")
@pytest.mark.filterwarnings("default")
def test_a_part_that_fails_is_reported_and_the_others_are_measured(tmp_path: Path) -> None:
    # mmsegmentation's configurations need a ResNet with 50 layers or more.
    setting = SETTING._replace(backbone="resnet18", size=(17, 17))
    done = [
        part.model for part, _ in measure_heads(["fcn", "danet"], ["eager"], setting, torch.device("cpu"), seconds=0)
    ]
    assert done == ["fcn", "mmseg:fcn", "danet", "mmseg:danet"]
    arguments = ["--heads", "fcn", "--modes", "eager", "--backbone", "resnet18", "--batch", "2", "--size", "17"]
    arguments += ["--seconds", "0", "--num-classes", "4", "--dtype", "float32", "--device", "cpu"]
    assert main(["benchmark", "heads", *arguments, "--json", str(tmp_path / "heads.json")]) == 1
    content = json.loads((tmp_path / "heads.json").read_text())
    assert [record["model"] for record in content["models"]] == ["fcn"]
    assert content["failed"]["mmseg:fcn"].startswith("CaasegError: model is 'mmseg:fcn' with backbone resnet18")
